"""`DraftModel`: a small model that drafts tokens for the sequences of a larger one; a `Proposer`.

All sequences that decode in a batch draft together: each step of the draft model gives every one of them one token
more. Tokens are sampled as the target's are, with the same noise for the same position (`Sampler`), so that a draft
model that agrees with the target agrees with it in sampled replies too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tllm.comm.collectives.group import solo
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.positions import lengths, positions
from tllm.engine.compute.sampler import Sampler
from tllm.engine.pages.page_table import PagePool
from tllm.engine.schedule.batch import Batch, BatchEntry, Sampling
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.proposer import DraftedSequence, num_accepted_tokens
from tllm.model.transformer import Transformer
from tllm.parallel.quantized_weight import stands_for

MOST_LAG = 32
"""Tokens that a sequence may lack in the draft model's cache and still draft: its first step computes them all."""

CATCH_UP = 256
"""Tokens of prompts that are computed at once, so that batches do not wait long for it."""


@dataclass
class CachedSequence:
    """What the draft model's cache holds of a sequence: its first `sound` tokens, and draft tokens after them."""

    sound: int = 0
    drafted: list[int] = field(default_factory=list)

    def roll_back(self, token_ids: list[int]) -> None:
        """Keep what turned out to be the sequence's own tokens; the last of these is always computed anew."""
        accepted = num_accepted_tokens(self.drafted, token_ids[self.sound :])
        self.sound, self.drafted = min(self.sound + accepted, len(token_ids) - 1), []


class DraftingSequence(NamedTuple):
    """A sequence that drafts: what the cache has of it, and its draft so far."""

    sequence: DraftedSequence
    cached: CachedSequence
    sampling: Sampling
    draft: list[int]


class DraftModel:
    """The whole model in one thread, with a cache and pages of its own, which follow the target's sequences.

    `limits` are the sizes of its own cache and vocabulary; ids of `target_vocab_size` or more are never drafted. A
    sequence for which there are no pages, which is longer than the model's context or which has tokens that the model
    does not know gets no drafts.
    """

    def __init__(self, model: Transformer, limits: Limits, target_vocab_size: int) -> None:
        self.model, self.limits = model, limits
        self.pool = PagePool(limits.num_pages, limits.page_size)
        dtype = stands_for(next(model.parameters()))[1]
        self.cache = KVCache(model.attention_specs(), limits, dtype)
        self._vocab_size = min(limits.vocab_size, target_vocab_size)
        self._sampler = Sampler(self._logits, solo(), [(0, self._vocab_size)])
        self._cached: dict[int, CachedSequence] = {}

    @torch.inference_mode()
    def prepare(self, sequences: Sequence[DraftedSequence]) -> None:
        """Compute up to `CATCH_UP` tokens of sequences that lack more than a draft's first step computes."""
        room, pieces = CATCH_UP, list[tuple[DraftedSequence, CachedSequence, int]]()
        for sequence in sequences:
            cached = self._cached.setdefault(sequence.key, CachedSequence())
            if self._lag(sequence, cached) <= MOST_LAG:
                continue  # perhaps its draft is being checked: what the cache has of that is kept until it is known
            cached.roll_back(sequence.token_ids)
            count = min(len(sequence.token_ids) - 1 - cached.sound, room)
            if count > 0 and self._covers(sequence, cached, 0):
                pieces.append((sequence, cached, count))
                room -= count
        pieces.sort(key=lambda piece: piece[2] > 1)
        if pieces:
            entries = [self._entry(sequence, cached.sound, count) for sequence, cached, count in pieces]
            ids = [t for one, cached, count in pieces for t in one.token_ids[cached.sound : cached.sound + count]]
            self._compute(entries, ids)
        for _, cached, count in pieces:
            cached.sound += count

    @torch.inference_mode()
    def propose(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        """Draft so many tokens of each sequence, one step for all of them after the other."""
        drafts: list[list[int]] = [[] for _ in sequences]
        drafting = []
        for sequence, count, draft in zip(sequences, counts, drafts, strict=True):
            cached = self._cached.setdefault(sequence.key, CachedSequence())
            cached.roll_back(sequence.token_ids)
            if count > 0 and self._lag(sequence, cached) <= MOST_LAG and self._covers(sequence, cached, count - 1):
                one = DraftingSequence(sequence, cached, self._sampling(sequence), draft)
                drafting.append((count, one))
        for step in range(max((count for count, _ in drafting), default=0)):
            going_on = [one for count, one in drafting if count > step and len(one.draft) == step]
            if going_on:
                self._step(going_on)
        return drafts

    def release(self, key: int) -> None:
        """Let go of a sequence's pages."""
        self._cached.pop(key, None)
        self.pool.release(key)

    def _step(self, drafting: list[DraftingSequence]) -> None:
        """One token more for each. The first step also computes what the cache lacks of a sequence."""
        drafting.sort(key=lambda one: not one.draft and self._lag(one.sequence, one.cached) > 1)
        entries, ids = list[BatchEntry](), list[int]()
        for sequence, cached, sampling, draft in drafting:
            length = len(sequence.token_ids)
            if draft:
                new, start = draft[-1:], length + len(draft) - 1
                cached.drafted += new
            else:
                new, start = sequence.token_ids[cached.sound :], cached.sound
                cached.sound = length
            if sampling.history:
                sampling = msgspec.structs.replace(sampling, history=(*sampling.history, *draft))
            entries.append(self._entry(sequence, start, len(new), sampling))
            ids += new
        results = self._sampler(*self._compute(entries, ids))
        assert results is not None, "a group of one leads itself"
        for one, token_id in zip(drafting, results.token_ids, strict=True):
            if token_id < self._vocab_size:  # else none could be drawn, and this draft ends
                one.draft.append(token_id)

    def _compute(self, entries: list[BatchEntry], token_ids: list[int]) -> tuple[Tensor, Batch]:
        batch = Batch(0, tuple(entries), tuple(token_ids))
        lengths_T = lengths(batch) if self.model.scales_by_length else None
        attend = PagedAttend(self.cache, batch.entries)
        return self.model(torch.tensor(batch.token_ids), positions(batch), attend, lengths_T), batch

    def _entry(self, sequence: DraftedSequence, start: int, count: int, sampling: Sampling | None = None) -> BatchEntry:
        table = self.pool.page_table(sequence.key)
        return BatchEntry(sequence.key, start, count, sequence.prompt_length, table, sampling)

    def _covers(self, sequence: DraftedSequence, cached: CachedSequence, more: int) -> bool:
        """Whether the cache has room for the sequence and so many draft tokens, and the model knows its tokens."""
        tokens = len(sequence.token_ids) + more
        if tokens > self.limits.max_model_len or max(sequence.token_ids[cached.sound :]) >= self.limits.vocab_size:
            return False
        return self.pool.cover(sequence.key, tokens, self.limits.max_model_len)

    def _sampling(self, sequence: DraftedSequence) -> Sampling:
        """How the target samples, as far as this model has the tokens."""
        sampling = sequence.sampling()
        if sampling.is_plain_greedy:
            return sampling
        return msgspec.structs.replace(
            sampling,
            logprobs=None,
            logit_bias={
                token_id: bias for token_id, bias in sampling.logit_bias.items() if token_id < self._vocab_size
            },
            banned=tuple(token_id for token_id in sampling.banned if token_id < self._vocab_size),
        )

    def _logits(self, x_TD: Tensor) -> Tensor:
        return self.model.logits(x_TD)[:, : self._vocab_size]

    @staticmethod
    def _lag(sequence: DraftedSequence, cached: CachedSequence) -> int:
        return len(sequence.token_ids) - cached.sound
