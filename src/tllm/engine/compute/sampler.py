"""From the last layer's hidden states to tokens: the `Sampler`, which ends every batch on the last stage.

1. It picks the rows after which an entry wants a token and asks the model for their logits, `ROWS_AT_ONCE` at a time.
2. The ranks of the stage have a part of the vocabulary each. Where every row is plain greedy, only each rank's best
   token travels to the leader, otherwise the logits do.
3. The leader samples: `sample_token` applies penalties, bias and a grammar's mask, leaves the tokens that min-p, top-k
   and top-p allow, and draws one of them.

A sampled token depends on its logits, its `Sampling` and its position, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import msgspec
import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.engine.compute.grammar_masks import apply_mask
from tllm.engine.compute.logits_processing import apply_penalties, candidates, gumbel_noise
from tllm.engine.schedule.batch import Batch, BatchEntry, Results, Sampling
from tllm.planner.cost.cache_room import ROWS_AT_ONCE
from tllm.spec.cut import Range
from tllm.spec.request import TokenLogprobs


class Sampler:
    """Makes the results of a batch. Every rank of the last stage calls it; only the leader (tp rank 0) gets them.

    `logits` maps hidden states [rows, width] to logits [rows, this rank's part of the vocabulary]; `vocab_ranges` are
    the parts of all ranks, in order.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], tp: Group, vocab_ranges: list[Range]) -> None:
        self.logits = logits
        self.tp = tp
        self.widths = [stop - start for start, stop in vocab_ranges]
        self.first_id = vocab_ranges[tp.rank][0]

    def __call__(self, x_TD: Tensor, batch: Batch) -> Results | None:
        """Results from the hidden states of all the batch's tokens; None on a rank that does not lead."""
        sampled = self._sample(x_TD, batch)
        prompt_logprobs = self._prompt_logprobs(x_TD, batch)
        if sampled is None or prompt_logprobs is None:
            return None
        token_ids, logprobs = sampled
        return Results(number=batch.number, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _sample(self, x_TD: Tensor, batch: Batch) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]] | None:
        """The tokens that entries want, and log-probabilities where they ask for them; None but on the leader."""
        rows, wanted, stop = list[int](), list[tuple[Sampling, int]](), 0
        for entry in batch.entries:
            stop += entry.count
            rows += range(stop - entry.num_sampled, stop)
            wanted += sampling_of_each_token(entry, batch.token_ids[stop - entry.num_draft_tokens : stop])
        if not rows:
            return ((), ()) if self.tp.rank == 0 else None
        if all(sampling.is_plain_greedy for sampling, _ in wanted):
            pieces = [rows[at : at + ROWS_AT_ONCE] for at in range(0, len(rows), ROWS_AT_ONCE)]
            most_likely = [self._argmax(_take_rows(x_TD, piece)) for piece in pieces]
            return None if self.tp.rank else (tuple(chain.from_iterable(most_likely)), ())
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for (sampling, position), logits_V in zip(wanted, self.whole_logits(x_TD, rows), strict=True):
            if logits_V is not None:
                token_ids.append(sample_token(logits_V, sampling, position))
                top = sampling.logprobs
                scores_V = logits_V / sampling.temperature if sampling.tempered_logprobs else logits_V
                logprobs.append(None if top is None else token_logprobs(scores_V, token_ids[-1], top))
        if self.tp.rank:
            return None
        return tuple(token_ids), tuple(logprobs) if any(logprobs) else ()

    def _prompt_logprobs(self, x_TD: Tensor, batch: Batch) -> tuple[tuple[TokenLogprobs, ...], ...] | None:
        """Log-probabilities of the prompt tokens that entries ask for; None but on the leader."""
        rows, start = list[int](), 0
        for entry in batch.entries:
            rows += range(start, start + len(entry.targets))
            start += entry.count
        whole_logits = self.whole_logits(x_TD, rows)
        logprobs = []
        for entry in batch.entries:
            if entry.targets:
                pairs = zip(entry.targets, whole_logits, strict=False)
                logprobs.append(
                    tuple(token_logprobs(row, target, entry.prompt_top) for target, row in pairs if row is not None)
                )
        return tuple(logprobs) if self.tp.rank == 0 else None

    def _argmax(self, x_RD: Tensor) -> list[int]:
        """The most likely token of each row, the lowest id where several are equal; none of them but on the leader.

        Of each rank's part of the vocabulary only the best token and its logit travel.
        """
        logits_RV = self.logits(x_RD)
        if self.tp.size == 1:
            whole_R: list[int] = logits_RV.argmax(-1).tolist()
            return whole_R
        values, columns = logits_RV.max(-1)
        best = torch.stack((values.double(), (columns + self.first_id).double()))  # doubles hold every id exactly
        parts = self.tp.gather(best, [tuple(best.shape)] * self.tp.size)
        if parts is None:
            return []
        values_PR, ids_PR = torch.stack(parts).unbind(1)
        best_R: list[int] = ids_PR.gather(0, values_PR.argmax(0, keepdim=True))[0].long().tolist()
        return best_R

    def whole_logits(self, x_TD: Tensor, rows: list[int]) -> Iterator[Tensor | None]:
        """Logits over the whole vocabulary for one row after another on the leader, None for each elsewhere."""
        for at in range(0, len(rows), ROWS_AT_ONCE):
            logits_RV = self.logits(_take_rows(x_TD, rows[at : at + ROWS_AT_ONCE]))
            if self.tp.size > 1:
                parts = self.tp.gather(logits_RV, [(len(logits_RV), width) for width in self.widths])
                if parts is None:
                    yield from [None] * len(logits_RV)
                    continue
                logits_RV = torch.cat(parts, dim=-1)
            yield from logits_RV


def sampling_of_each_token(entry: BatchEntry, draft_tokens: tuple[int, ...]) -> Iterator[tuple[Sampling, int]]:
    """The `Sampling` and the position of each token that an entry wants, as if the draft tokens before it were output.

    So penalties see the draft tokens before a token, and what is accepted is what would have come without drafts.
    """
    sampling = entry.sampling
    if sampling is None:
        return
    for count in range(1 + len(draft_tokens)):
        if count and sampling.history:
            sampling = msgspec.structs.replace(sampling, history=(*sampling.history, draft_tokens[count - 1]))
        if entry.masks:
            sampling = msgspec.structs.replace(sampling, mask=entry.masks[count])
        yield sampling, entry.stop - len(draft_tokens) + count


def sample_token(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of its sequence, 0 being the first of the prompt.

    It is drawn by the Gumbel-max trick: each token's score plus Gumbel noise of its own, and the highest sum wins.
    The noise follows from (seed, position, token), so that a reply does not depend on what else is in the batch, on
    how the model is cut, or on where it was broken off and resumed.
    """
    scores_V = apply_penalties(logits_V, sampling)
    if sampling.mask:
        scores_V = apply_mask(scores_V, sampling.mask)
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scores_V = (scores_V - scores_V.max()) / sampling.temperature
    ids_C = candidates(scores_V, sampling)
    noisy_C = scores_V[ids_C].double() + gumbel_noise(ids_C, sampling.seed, position)
    return int(ids_C[noisy_C.argmax()])


def token_logprobs(logits_V: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """A token's log-probability under the model itself, and those of the `top` likeliest tokens."""
    logprobs_V = torch.log_softmax(logits_V, -1)
    values, ids = logprobs_V.topk(min(top, logprobs_V.shape[0]))
    likeliest = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, float(logprobs_V[token_id]), tuple(likeliest))


def _take_rows(x_TD: Tensor, rows: list[int]) -> Tensor:
    return x_TD if len(rows) == len(x_TD) else x_TD[rows]
