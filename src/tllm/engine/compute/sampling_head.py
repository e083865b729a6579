"""The end of the last stage: the rows that need logits, brought together over its ranks, turned into results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import msgspec
import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.engine.compute.sampler import choose, scored
from tllm.engine.schedule.batch import Batch, Entry, Results, Sampling
from tllm.planner.cost.cache_room import ROWS_AT_ONCE
from tllm.spec.cut import Range
from tllm.spec.request import TokenLogprobs


class Head:
    """Makes the results of a batch. Every rank of the last stage calls it; only the leader gets results.

    `logits` gives this rank's part of the vocabulary, `vocabs` the parts of all ranks, in order.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], tp: Group, vocabs: list[Range]) -> None:
        self.logits = logits
        self.tp = tp
        self.widths = [stop - start for start, stop in vocabs]
        self.first = vocabs[tp.rank][0]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Results | None:
        chosen = self._choose(x_TD, batch)
        prompt = self._score_prompts(x_TD, batch)
        if chosen is None or prompt is None:
            return None
        token_ids, logprobs = chosen
        return Results(number=batch.number, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt)

    def _choose(self, x_TD: Tensor, batch: Batch) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]] | None:
        """Each token that an entry wants chosen, log-probabilities where asked; None but on the leader."""
        rows, choices, at = list[int](), list[tuple[Sampling, int]](), 0
        for entry in batch.entries:
            at += entry.count
            rows += range(at - entry.chosen, at)
            choices += choices_of(entry, batch.token_ids[at - entry.drafted : at])
        if not rows:
            return ((), ()) if self.tp.rank == 0 else None
        if all(sampling.plain for sampling, _ in choices):
            pieces = [rows[at : at + ROWS_AT_ONCE] for at in range(0, len(rows), ROWS_AT_ONCE)]
            likeliest = [self._likeliest(_rows(x_TD, piece)) for piece in pieces]
            return None if self.tp.rank else (tuple(chain.from_iterable(likeliest)), ())
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        whole_rows = self._whole(x_TD, rows)
        for (sampling, position), logits_V in zip(choices, whole_rows, strict=True):
            if logits_V is not None:
                token_ids.append(choose(logits_V, sampling, position))
                top = sampling.logprobs
                logprobs.append(None if top is None else scored(logits_V, token_ids[-1], top))
        if self.tp.rank:
            return None
        return tuple(token_ids), tuple(logprobs) if any(logprobs) else ()

    def _score_prompts(self, x_TD: Tensor, batch: Batch) -> tuple[tuple[TokenLogprobs, ...], ...] | None:
        """Log-probabilities of the prompt tokens that entries ask for; None but on the leader."""
        rows: list[int] = []
        at = 0
        for entry in batch.entries:
            rows += range(at, at + len(entry.targets))
            at += entry.count
        whole_rows = self._whole(x_TD, rows)
        result = []
        for entry in batch.entries:
            if entry.targets:
                pairs = zip(entry.targets, whole_rows, strict=False)
                result.append(tuple(scored(row, target, entry.prompt_top) for target, row in pairs if row is not None))
        return tuple(result) if self.tp.rank == 0 else None

    def _likeliest(self, x_RD: Tensor) -> list[int]:
        """The likeliest token of each row, of equals the lowest id: of each rank's part only the best one travels.

        None of them but on the leader.
        """
        logits_RV = self.logits(x_RD)
        if self.tp.size == 1:
            first_R: list[int] = logits_RV.argmax(-1).tolist()
            return first_R
        values, places = logits_RV.max(-1)
        best = torch.stack((values.double(), (places + self.first).double()))  # doubles hold every id exactly
        parts = self.tp.gather(best, [tuple(best.shape)] * self.tp.size)
        if parts is None:
            return []
        values_PR, ids_PR = torch.stack(parts).unbind(1)
        best_R: list[int] = ids_PR.gather(0, values_PR.argmax(0, keepdim=True))[0].long().tolist()
        return best_R

    def _whole(self, x_TD: Tensor, rows: list[int]) -> Iterator[Tensor | None]:
        """Logits over the whole vocabulary for one row after another on the leader, None for each elsewhere."""
        for at in range(0, len(rows), ROWS_AT_ONCE):
            logits_RV = self.logits(_rows(x_TD, rows[at : at + ROWS_AT_ONCE]))
            if self.tp.size > 1:
                parts = self.tp.gather(logits_RV, [(len(logits_RV), width) for width in self.widths])
                if parts is None:
                    yield from [None] * len(logits_RV)
                    continue
                logits_RV = torch.cat(parts, dim=-1)
            yield from logits_RV


def choices_of(entry: Entry, drafted: tuple[int, ...]) -> Iterator[tuple[Sampling, int]]:
    """How each token that an entry wants is chosen, and its position, as if what is drafted before it was given out."""
    sampling = entry.sampling
    if sampling is None:
        return
    for count in range(1 + len(drafted)):
        if count and sampling.history:
            sampling = msgspec.structs.replace(sampling, history=(*sampling.history, drafted[count - 1]))
        yield sampling, entry.stop - len(drafted) + count


def _rows(x_TD: Tensor, rows: list[int]) -> Tensor:
    return x_TD if len(rows) == len(x_TD) else x_TD[rows]
