"""How long a stage's step takes, and how much of that its layers take: both are timed in the same step.

So a moment at which this machine is slow makes the overhead of a step (all but its layers) no longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from torch import Tensor

from tllm.engine.decode_recordings import RecordedSteps
from tllm.engine.driver import Deliver, Driver
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.batch import Batch
from tllm.engine.stage import PipelineStage
from tllm.engine.stage_model import StageModel
from tllm.model.attention import Attend
from tllm.parallel.linear import Adapt, unadapted
from tllm.spec.request import Request, SamplingParams

MAX_REPLY_TOKENS = 256
"""Tokens of the replies that are generated while steps are measured."""

MIN_STEPS = 3
"""Steps that are measured at least."""


class TimedLayers:
    """A stage's model whose layers are timed: `seconds` has what each batch took through them."""

    def __init__(self, model: StageModel) -> None:
        self.model, self.is_first, self.is_last, self.logits = model, model.is_first, model.is_last, model.logits
        self.received_width, self.scales_by_length = model.received_width, model.scales_by_length
        self.seconds = list[float]()

    def __call__(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lengths_T: Tensor | None = None,
        adapt: Adapt = unadapted,
        ids_T: Tensor | None = None,
    ) -> Tensor:
        begun = time.perf_counter()
        out_TD = self.model(x, positions_T, attend, lengths_T, adapt, ids_T)
        self.seconds.append(time.perf_counter() - begun)
        return out_TD


class TimedSteps:
    """A stage's layers as they are played, timed: what each batch takes is added to `seconds`."""

    def __init__(self, steps: RecordedSteps, seconds: list[float]) -> None:
        self.takes, self._steps, self._seconds = steps.takes, steps, seconds

    def __call__(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        begun = time.perf_counter()
        out_TD = self._steps(batch, x_TD)
        self._seconds.append(time.perf_counter() - begun)
        return out_TD


def time_layers(stage: PipelineStage) -> TimedLayers:
    """From now on the stage's layers are timed, be they played or not."""
    timed = TimedLayers(stage.model)
    stage.model = timed
    if stage.graphs is not None:
        stage.graphs = TimedSteps(stage.graphs, timed.seconds)
    return timed


class TimedStep:
    """A step of a stage, to be called again and again: how long its layers take, and all else in it.

    Only calls that make the stage compute one batch count. In a step layers find caches cold after all else.
    """

    def __init__(self, stage: PipelineStage, step: Callable[[], object]) -> None:
        self._layers, self._step = time_layers(stage), step
        self._measured = list[tuple[float, float]]()

    def __call__(self) -> None:
        batches, begun = len(self._layers.seconds), time.perf_counter()
        self._step()
        whole = time.perf_counter() - begun
        if len(self._layers.seconds) == batches + 1:
            self._measured.append((whole, self._layers.seconds[-1]))

    @property
    def overhead_seconds(self) -> float:
        """What a step takes beside its layers: the median."""
        return statistics.median(whole - layers for whole, layers in self._enough())

    @property
    def layer_seconds(self) -> float:
        """What its layers take: the mean."""
        return statistics.fmean(layers for _, layers in self._enough())

    def _enough(self) -> list[tuple[float, float]]:
        while len(self._measured) < MIN_STEPS:
            self()
        return self._measured


def decode_step(driver: Driver, sequences: int, prompt: int, deliver: Deliver) -> None:
    """One step of the driver with a token of each of so many sequences, after prompts of `prompt` tokens.

    When the replies end new ones begin; their prompts are computed before the step.
    """
    if not driver.has_work:
        params = SamplingParams(max_tokens=MAX_REPLY_TOKENS, temperature=0, ignore_eos=True)
        for number in range(sequences):
            driver.submit(Request(id=f"survey-{number}", prompt_ids=(0,) * prompt, params=params))
        while any(sequence.num_output == 0 for sequence in driver.scheduler.by_id.values()):
            driver.step()
    deliver(driver.step())


def follower_step(stage: PipelineStage, ring: RingLinks, payload: bytes, x_TD: Tensor) -> None:
    """One step of a last stage: a batch and hidden states come to it, and its results go."""
    ring.previous.send_bytes(payload)
    ring.previous.send(x_TD)
    stage.serve_one()
    ring.next.recv_bytes(stage.limits.results_bytes)
