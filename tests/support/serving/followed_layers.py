"""`FollowedLayers`: what recorded steps do for `OverlappedSteps`, computed layer by layer on any device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from tllm.engine.driver import Driver
from tllm.engine.overlapped_steps import OverlappedSteps
from tllm.engine.schedule.batch import Batch
from tllm.engine.stage import PipelineStage


class FollowedLayers:
    """Counts the batches that were begun before the host knew their ids, and their rows."""

    def __init__(self, stage: PipelineStage) -> None:
        self.stage, self.batches, self.rows = stage, 0, 0

    def takes(self, batch: Batch) -> bool:
        return len(batch.entries) == len(batch.token_ids) and not any(entry.lora for entry in batch.entries)

    def __call__(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        assert x_TD is None, "these are the layers of a whole model"
        return self.stage._layers(batch, None)

    def follow(self, batch: Batch, sources: Sequence[int], tokens_R: Tensor) -> Tensor:
        assert not any(batch.token_ids) and len(sources) == len(batch.entries), "zeros stand for what is not known"
        self.batches, self.rows = self.batches + 1, self.rows + len(sources)
        ids = tokens_R[list(sources)].tolist()
        return self.stage._layers(msgspec.structs.replace(batch, token_ids=tuple(ids)), None)


def overlap(driver: Driver) -> FollowedLayers:
    """Let a driver overlap its steps, as on a device on which they are recorded."""
    layers = FollowedLayers(driver.stage)
    driver.overlap = OverlappedSteps(driver.stage, driver.scheduler, layers)
    return layers
