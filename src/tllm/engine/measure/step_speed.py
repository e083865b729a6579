"""What a stage's step takes beside its layers: each is timed in that very step, so that no noise of theirs counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from torch import Tensor

from tllm.engine.driver import Deliver, Driver
from tllm.engine.stage import PipelineStage, RingLinks, StageModel
from tllm.model.attention import Attend
from tllm.spec.request import Request, SamplingParams

TOKENS = 256
"""The longest reply while steps are measured."""

FEW = 3
"""Steps."""


class TimedLayers:
    """A stage's layers, and how long each batch took through them."""

    def __init__(self, model: StageModel) -> None:
        self.model, self.is_first, self.is_last, self.logits = model, model.is_first, model.is_last, model.logits
        self.seconds = list[float]()

    def __call__(self, x: Tensor, positions_T: Tensor, attend: Attend, lengths_T: Tensor | None = None) -> Tensor:
        begun = time.perf_counter()
        out_TD = self.model(x, positions_T, attend, lengths_T)
        self.seconds.append(time.perf_counter() - begun)
        return out_TD


def timed(stage: PipelineStage) -> TimedLayers:
    """The stage's layers, which are timed from now on."""
    stage.model = found = TimedLayers(stage.model)
    return found


class TimedStep:
    """A step of a stage, as work; of those with one batch, in the middle of all: what of it is `beside` layers, and
    what `layers` take in it, which find caches cold after all else."""

    def __init__(self, stage: PipelineStage, work: Callable[[], object]) -> None:
        self._timed, self._work = timed(stage), work
        self._found = list[tuple[float, float]]()

    def __call__(self) -> None:
        done, begun = len(self._timed.seconds), time.perf_counter()
        self._work()
        whole = time.perf_counter() - begun
        if len(self._timed.seconds) == done + 1:
            self._found.append((whole, self._timed.seconds[-1]))

    @property
    def beside(self) -> float:
        """Seconds."""
        return statistics.median(whole - layers for whole, layers in self._enough())

    @property
    def layers(self) -> float:
        """Seconds, on an average."""
        return statistics.fmean(layers for _, layers in self._enough())

    def _enough(self) -> list[tuple[float, float]]:
        while len(self._found) < FEW:
            self()
        return self._found


def token_of_each(driver: Driver, count: int, prompt: int, deliver: Deliver) -> None:
    """One token of each of so many sequences; after the last of their replies they begin anew."""
    if not driver.has_work:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        for number in range(count):
            driver.submit(Request(id=f"survey-{number}", prompt_ids=(0,) * prompt, params=params))
        while any(sequence.num_output == 0 for sequence in driver.scheduler.by_id.values()):
            driver.step()
    deliver(driver.step())


def take_part(stage: PipelineStage, ring: RingLinks, payload: bytes, x_TD: Tensor) -> None:
    """A stage that follows: a batch with a token of each sequence, and its results."""
    ring.previous.send_bytes(payload)
    ring.previous.send(x_TD)
    stage.serve_one()
    ring.next.recv_bytes(stage.limits.results_bytes)
