"""`Pooler`: turns the last layer's hidden states into embeddings and scores, for prompts that are pooled.

A row of a hidden state is pooled by itself, so that nothing depends on what else is in the batch. A mean is of sums
that have twice the digits of a float64, so that it does not depend on how the prompt is cut into chunks either.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from tllm.engine.compute.logprobs import on_host
from tllm.engine.compute.sampler import Sampler
from tllm.engine.schedule.batch import Batch, Results


class Pooler:
    """Completes the results of a batch with what its prompts come to. Every rank of the last stage calls it.

    `normed` maps hidden states [rows, width] to those after the final norm, `scores` to those of a classification head
    [rows, labels]. The `sampler` has the logits of the whole vocabulary. If `is_cut`, ranks have parts of the rows'
    columns, and `normed` puts these together, for which all ranks call it.
    """

    def __init__(
        self,
        normed: Callable[[Tensor], Tensor],
        scores: Callable[[Tensor], Tensor],
        sampler: Sampler,
        is_cut: bool = False,
    ) -> None:
        self.normed, self.scores, self.sampler, self.is_cut = normed, scores, sampler, is_cut

    def __call__(self, x_TD: Tensor, batch: Batch, results: Results | None) -> Results | None:
        """The sampler's results with `pooled`; None on a rank that does not lead."""
        pooled, stop = list[Tensor](), 0
        for entry in batch.entries:
            start, stop = stop, stop + entry.count
            if entry.pooling is None:
                continue
            if entry.pooling.kind == "logprobs":  # the ranks have a part of the vocabulary each
                pooled += self._logprobs(x_TD, stop - 1, entry.pooling.token_ids)
            elif self.is_cut or results is not None:
                pooled.append(self._values(x_TD[start:stop], entry.pooling.kind))
        if results is None or not pooled:
            return results
        return msgspec.structs.replace(results, pooled=tuple(tuple(values.tolist()) for values in on_host(pooled)))

    def _values(self, x_TD: Tensor, kind: str) -> Tensor:
        if kind == "score":
            return self.scores(x_TD[-1:])[0].double()
        if kind == "last":
            return self.normed(x_TD[-1:])[0].double()
        return precise_sum(self.normed(x_TD)).flatten()

    def _logprobs(self, x_TD: Tensor, row: int, token_ids: tuple[int, ...]) -> list[Tensor]:
        """Log-probabilities of tokens after a row; none of them but on the leader."""
        whole = self.sampler.whole_logits(x_TD, [row])
        return [torch.log_softmax(x.double(), -1)[0, torch.tensor(token_ids).to(x.device)] for x in whole]


def precise_sum(x_TD: Tensor) -> Tensor:
    """The sum of all rows as two float64 [2, D] whose exact sum it is but for an error of some 2^-104 of the largest.

    Rows are added in pairs, then the sums of pairs, and so on. What each addition rounds away is found exactly (Knuth's
    TwoSum, The Art of Computer Programming 2, 4.2.2) and summed beside.
    """
    high = x_TD.double()
    low = torch.zeros_like(high)
    while len(high) > 1:
        if len(high) % 2:
            high, low = (torch.cat((part, torch.zeros_like(part[:1]))) for part in (high, low))
        a, b = high[0::2], high[1::2]
        high = a + b
        of_b = high - a
        low = low[0::2] + low[1::2] + ((a - (high - of_b)) + (b - of_b))
    return torch.cat((high, low))
