"""`LikelihoodPass`: how likely given continuations of given tokens are, with the weights that a run has now.

They are computed by forward passes of the trainer's own model, and so under every plan that trains. Several
continuations share a row, and do not see each other there. Rows are sent by the group of all ranks, because rows of the
next step may be under way on the links of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from tllm.core.errors import ConfigError, decoded
from tllm.model.transformer import Transformer
from tllm.training.data.batch_feed import LIMIT, NO_ROWS, ReplicaBatch, split_global_batch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.evaluation.document_results import PLACE, results_by_place
from tllm.training.evaluation.forward_rows import MICROBATCHES, filled_up
from tllm.training.objectives.continuation_scores import ContinuationScores
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel

END = b"end"
"""What is told when no further rows come."""


class Continuation(NamedTuple):
    """Tokens to go on from, of which there is one at least, and those whose probability is asked for."""

    context: Sequence[int]
    ids: Sequence[int]


class Likelihood(NamedTuple):
    """log p(continuation | context), and whether each of its tokens is the likeliest at its place."""

    log_prob: float
    is_greedy: bool


class LikelihoodPass:
    """Every rank makes the same calls: rank 0 `of`, the others `follow`."""

    def __init__(self, config: RankConfig, model: RankModel) -> None:
        self._groups, self._model = config.groups, model
        self._replicas, self._replica = len(config.plan.dp), config.plan.coordinates(config.rank).replica
        self._microbatch_size = config.job.microbatch_size
        self._scores = ContinuationScores(model.mesh, config.groups.cp)

    def of(self, rows: Sequence[Sequence[Continuation]]) -> list[Likelihood]:
        """On rank 0: of those of `packed_rows`, in order."""
        found: list[Likelihood] = []
        size = self._replicas * MICROBATCHES * self._microbatch_size
        for at in range(0, len(rows), size):
            first, numbered = 1, []
            for row in rows[at : at + size]:
                numbered.append(_numbered(row, first))
                first += len(row)
            scores = self._computed(self._sent(numbered))[1:first].tolist()
            found += [Likelihood(log_prob, others == 0) for log_prob, others in scores]
        self._groups.world.broadcast_bytes(END)
        return found

    def follow(self) -> None:
        """On another rank: what `of` asks for."""
        while (content := self._groups.world.broadcast_bytes(None, limit=LIMIT)) != END:
            self._computed(decoded(content, _BATCHES, NO_ROWS)[self._replica])

    def _sent(self, rows: Sequence[PackedRow]) -> ReplicaBatch:
        """Tell every rank the parts of all replicas, who have as many microbatches each; this one's."""
        whole = filled_up(rows, self._replicas * self._microbatch_size)
        parts = split_global_batch(whole, (1,) * self._replicas, self._microbatch_size)
        self._groups.world.broadcast_bytes(msgspec.msgpack.encode(parts), limit=LIMIT)
        return parts[self._replica]

    def _computed(self, batch: ReplicaBatch) -> Tensor:
        """Of each place its log-probability, and how many of its tokens are not the likeliest."""
        return results_by_place(self._model, self._groups, batch, self._scored, shape=(2,))

    def _scored(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        return torch.stack([x_N.double() for x_N in self._scores(model, x_TD, tokens)], 1)


_BATCHES = msgspec.msgpack.Decoder(list[ReplicaBatch])


def packed_rows(continuations: Sequence[Continuation], longest: int) -> list[list[Continuation]]:
    """As many as fit in a row of so many tokens, in their order.

    What a context has too much for a row is left out at its beginning. ConfigError for a continuation that is longer.
    """
    rows: list[list[Continuation]] = []
    room = 0
    for one in _cut(continuations, longest):
        length = len(one.context) + len(one.ids) - 1
        if length > room:
            rows.append([])
            room = longest
        rows[-1].append(one)
        room -= length
    return rows


def _cut(continuations: Sequence[Continuation], longest: int) -> Iterator[Continuation]:
    for one in continuations:
        assert one.context and one.ids, "something to go on from, and something to go on with"
        if len(one.ids) > longest:
            raise ConfigError(
                f"a continuation has {len(one.ids)} tokens and seq_len is {longest}", "raise seq_len, or leave it out"
            )
        kept = longest + 1 - len(one.ids)
        yield Continuation(one.context[-kept:], one.ids)


def _numbered(row: Sequence[Continuation], first: int) -> PackedRow:
    """The row of these, whose places begin with `first`. Its last tokens are predicted and not seen."""
    ids, labels = [], []
    for one in row:
        ids += [*one.context, *one.ids[:-1]]
        labels += [*(IGNORED for _ in one.context[1:]), *one.ids]
    lengths = tuple(len(one.context) + len(one.ids) - 1 for one in row)
    return PackedRow(
        0,
        np.array(ids, dtype=np.int64),
        np.array(labels, dtype=np.int64),
        np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths,
        (),
        {PLACE: np.arange(first, first + len(row), dtype=np.int32)},
    )
