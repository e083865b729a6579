"""`PromptValues`: values gathered from a prompt's tokens chunk by chunk, such as log-probabilities. Plain Python, no
torch."""

from __future__ import annotations

import math

from tllm.engine.schedule.batch import BatchEntry
from tllm.spec.request import PoolingParams, Request, TokenLogprobs


class PromptValues:
    """Log-probabilities of a prompt's tokens, until they are given out, or what a prompt comes to that is pooled.

    `logprobs` is None where nobody asked. `sums` are those of the chunks that are computed, by their first positions.
    """

    def __init__(self, request: Request) -> None:
        # Tokens already given out came with them, so a request that is resubmitted does not ask again.
        is_asked = request.params.prompt_logprobs is not None and not request.output_ids
        self.logprobs: list[TokenLogprobs | None] | None = [None] if is_asked else None
        self.pooling = request.pooling
        self.length = len(request.prompt_ids)
        self.sums: dict[int, tuple[float, ...]] = {}

    @property
    def needs_every_token(self) -> bool:
        """Whether all tokens must be computed, so that pages of the cache are no help."""
        return self.logprobs is not None or (self.pooling is not None and self.pooling.kind == "mean")

    def pooling_of(self, stop: int) -> PoolingParams | None:
        """What a batch is asked for that computes tokens up to `stop`: of all but a mean, only the last one counts."""
        is_wanted = self.pooling is not None and (self.pooling.kind == "mean" or stop == self.length)
        return self.pooling if is_wanted else None

    def pool(self, entry: BatchEntry, values: tuple[float, ...]) -> tuple[float, ...] | None:
        """Take what a chunk came to; all that the prompt comes to after its last one, None before.

        A mean is the same however the prompt was cut into chunks: each chunk's sum has twice the digits of a float64,
        and the sum of these is rounded once.
        """
        assert self.pooling is not None, "only what is pooled comes to values"
        if self.pooling.kind != "mean":
            return values
        self.sums[entry.start] = values
        if entry.stop < self.length:
            return None
        width = len(values) // 2
        parts = [part for sums in self.sums.values() for part in (sums[:width], sums[width:])]
        self.sums.clear()
        if not all(math.isfinite(number) for part in parts for number in part):
            return (math.nan,) * width
        return tuple(math.fsum(column) / self.length for column in zip(*parts, strict=True))
