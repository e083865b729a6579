"""`Sampler`: turns the last layer's hidden states into tokens. Every batch ends there, on the last stage.

1. It picks the rows after which an entry wants a token and asks the model for their logits, `ROWS_AT_ONCE` at a time.
2. The ranks of the stage may have a part of the vocabulary each. Where every row is plain greedy, only each rank's best
   token travels to the leader, otherwise the logits do.
3. The leader samples all rows together: `sample_tokens` applies penalties, bias and grammars' masks, and draws a token
   of each row among those that min-p, top-k and top-p leave.

A sampled token depends on its logits, its `Sampling` and its position, and on nothing else. All this happens on the
device of the hidden states; what comes of a piece is brought to the host at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import msgspec
import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.engine.compute.logits_processing import draws_of, processed
from tllm.engine.compute.logprobs import largest, most_likely, take_rows, token_logprobs
from tllm.engine.schedule.batch import Batch, BatchEntry, Results, Sampling
from tllm.kernels.gumbel_max import gumbel_max
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
        token_ids, logprobs = self._sample(x_TD, batch)
        prompt_logprobs = self._prompt_logprobs(x_TD, batch)
        if self.tp.rank:
            return None
        return Results(number=batch.number, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _sample(self, x_TD: Tensor, batch: Batch) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
        """The tokens that entries want, and log-probabilities where they ask for them; nothing but on the leader."""
        rows, wanted = wanted_tokens(batch)
        if self.tp.size > 1 and all(sampling.is_plain_greedy for sampling, _ in wanted):
            greedy = [self._argmax(take_rows(x_TD, piece)) for piece in pieces_of(rows)]
            return tuple(chain.from_iterable(greedy)), ()
        token_ids, logprobs = list[int](), list[TokenLogprobs | None]()
        for logits_RV in self.whole_logits(x_TD, rows):
            asked = wanted[len(token_ids) :][: len(logits_RV)]
            ids_R = sample_tokens(logits_RV, asked)
            tops = [sampling.logprobs for sampling, _ in asked]
            tempered = [sampling.temperature if sampling.tempered_logprobs else 1.0 for sampling, _ in asked]
            found = token_logprobs(logits_RV, ids_R, tops, tempered)
            token_ids += found[0]
            logprobs += found[1]
        return tuple(token_ids), tuple(logprobs) if any(logprobs) else ()

    def token_ids(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """The tokens that entries want, where they lie on the device, [tokens]: on a single rank, without logprobs."""
        rows, wanted = wanted_tokens(batch)
        logits, asked = self.whole_logits(x_TD, rows), iter(wanted)
        return torch.cat([sample_tokens(x_RV, list(islice(asked, len(x_RV)))) for x_RV in logits])

    def _prompt_logprobs(self, x_TD: Tensor, batch: Batch) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Log-probabilities of the prompt tokens that entries ask for; nothing but on the leader."""
        asking, rows, start = list[BatchEntry](), list[int](), 0
        for entry in batch.entries:
            if entry.targets:
                asking.append(entry)
                rows += range(start, start + len(entry.targets))
            start += entry.count
        targets = [target for entry in asking for target in entry.targets]
        tops = [entry.prompt_top for entry in asking for _ in entry.targets]
        found = list[TokenLogprobs | None]()
        for logits_RV in self.whole_logits(x_TD, rows):
            piece = slice(len(found), len(found) + len(logits_RV))
            ids_R = torch.tensor(targets[piece]).to(logits_RV.device)
            found += token_logprobs(logits_RV, ids_R, tops[piece])[1]
        told = (one for one in found if one is not None)
        return tuple(tuple(islice(told, len(entry.targets))) for entry in asking)

    def _argmax(self, x_RD: Tensor) -> list[int]:
        """The most likely token of each row, the lowest id where several are equal; none of them but on the leader.

        Of each rank's part of the vocabulary only the best token and its logit travel. The vocabulary's size stands
        for a token whose logit is no finite number.
        """
        columns_R, values_R = largest(self.logits(x_RD))
        # Doubles hold every id exactly; what the other ranks send comes to the host.
        best = torch.stack((values_R.double(), (columns_R + self.first_id).double())).cpu()
        parts = self.tp.gather(best, [tuple(best.shape)] * self.tp.size)
        if parts is None:
            return []
        values_PR, ids_PR = torch.stack(parts).unbind(1)
        largest_R, places_R = values_PR.max(0)  # a NaN is larger than all
        best_R = ids_PR.gather(0, places_R[None])[0].masked_fill(~largest_R.isfinite(), sum(self.widths))
        token_ids: list[int] = best_R.long().tolist()
        return token_ids

    def whole_logits(self, x_TD: Tensor, rows: list[int]) -> Iterator[Tensor]:
        """Logits of these rows over the whole vocabulary, piece by piece; none but on the leader."""
        for piece in pieces_of(rows):
            logits_RV = self.logits(take_rows(x_TD, piece))
            if self.tp.size > 1:
                parts = self.tp.gather(logits_RV, [(len(logits_RV), width) for width in self.widths])
                if parts is None:
                    continue
                logits_RV = torch.cat([part.to(logits_RV.device) for part in parts], dim=-1)
            yield logits_RV


def wanted_tokens(batch: Batch) -> tuple[list[int], list[tuple[Sampling, int]]]:
    """The rows after which tokens are wanted, and of each its `Sampling` and its position."""
    rows, wanted, stop = list[int](), list[tuple[Sampling, int]](), 0
    for entry in batch.entries:
        stop += entry.count
        rows += range(stop - entry.num_sampled, stop)
        wanted += sampling_of_each_token(entry, batch.token_ids[stop - entry.num_draft_tokens : stop])
    return rows, wanted


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


def sample_tokens(logits_RV: Tensor, wanted: Sequence[tuple[Sampling, int]]) -> Tensor:
    """A token of each row, [R], for its `Sampling` and its position in its sequence, 0 being the first of the prompt.

    A temperature of 0 takes the most likely one. The vocabulary's size stands for a token of a row that has a NaN or
    plus infinity, or no finite number.
    """
    scores_RV = processed(logits_RV, [sampling for sampling, _ in wanted])
    drawn = [row for row, (sampling, _) in enumerate(wanted) if sampling.temperature > 0]
    if len(drawn) == len(wanted):
        return gumbel_max(scores_RV, draws_of(scores_RV, wanted))
    ids_R = most_likely(scores_RV)
    if drawn:
        rows_N, asked = torch.tensor(drawn).to(ids_R.device), [wanted[row] for row in drawn]
        scores_NV = scores_RV[rows_N]
        ids_R[rows_N] = gumbel_max(scores_NV, draws_of(scores_NV, asked))
    return ids_R


def pieces_of(rows: list[int]) -> Iterator[list[int]]:
    """Rows whose logits are in memory at the same time."""
    return (rows[at : at + ROWS_AT_ONCE] for at in range(0, len(rows), ROWS_AT_ONCE))
