"""`SampledAhead`: completions of future steps, which servers sample while the trainer learns (`max_staleness`).

When step k begins (the first is 0), the servers get its weights, and the prompts of step k + n, where n is the job's
`max_staleness`. So step k learns from completions of the weights with which step k - n began, and the first steps from
completions of the run's first weights. This depends on the number of the step alone, never on who was faster.

No save holds the weights of earlier steps. It holds the completions that were sampled with them, so that a resumed run
learns from the same: saves and snapshots of step k wait for the completions of the steps k to k + n - 1, and hold them.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tllm.core.errors import ConfigError
from tllm.training.data.prompt_batches import PromptBatches
from tllm.training.job.job_parts import steps_of_one_sampling
from tllm.training.policy.rollouts import Completion, RolloutOrder, SampledPart, decode_order, decode_part, sampling_of
from tllm.training.policy.tool_turns import Tools
from tllm.training.questions.waiting_ranks import Still, WaitingRanks, nobody
from tllm.training.rollout_servers.remote_rollouts import METRICS, AskedCompletions, RemoteRollouts, groups_of
from tllm.training.rollout_servers.turns_ahead import AskedTurns, TurnsAhead
from tllm.training.step.rank_groups import RankConfig

log = logging.getLogger("tllm.train")

STALENESS = "sampling/staleness"


@dataclass
class StepAhead:
    """Completions of a step, of the weights that step `sampled_at` began with: asked for, or `found` already."""

    sampled_at: int
    order: RolloutOrder
    asked: AskedCompletions | AskedTurns | None = None
    found: SampledPart | None = None
    metrics: dict[str, float] = field(default_factory=lambda: dict.fromkeys(METRICS, 0.0))

    def wait(self, still: Still = nobody) -> SampledPart:
        """The completions, once they are there; a fault where there are none."""
        if self.found is None:
            assert self.asked is not None, "what is not found is asked for"
            try:
                self.found = SampledPart(tuple(self.asked.wait(still)))
            except ConfigError as error:
                self.found = SampledPart(fault=(error.message, error.hint))
            else:
                self.metrics = self.asked.metrics
        return self.found

    @property
    def is_over(self) -> bool:
        return self.found is not None or (self.asked is not None and self.asked.is_over)


class KeptStep(msgspec.Struct, frozen=True):
    """A step's completions as a save holds them: `part` is a `SampledPart` in msgpack, base64; `asked` names the
    prompts and seeds that they are of."""

    step: int
    sampled_at: int
    part: str
    asked: str


class SampledAhead:
    """A `StepSampler`. Every rank makes the same calls; rank 0 asks, and has the completions. `tools` are rank 0's."""

    tool_seconds = 0.0

    def __init__(self, config: RankConfig, rollouts: RemoteRollouts, tools: Tools | None = None) -> None:
        assert config.job.rollouts is not None, "checked when the run began"
        self._is_first, self._ranks = config.rank == 0, WaitingRanks(config.groups.data)
        self._rollouts, self._sampling = rollouts, sampling_of(config.job)
        self._staleness, self._passes = config.job.rollouts.max_staleness, steps_of_one_sampling(config.job)
        self._turns = None if tools is None else TurnsAhead(rollouts, tools, self._sampling)
        self._begun_at, self._stop = 0, 0
        self._ahead: dict[int, StepAhead] = {}
        self._kept: dict[int, KeptStep] = {}  # of a save, not taken up yet
        self.metrics: Mapping[str, float] = {}

    def begin(self, step: int, stop: int) -> None:
        """Start with `step`; steps from `stop` on are not sampled."""
        self._begun_at, self._stop = step, stop

    def of_step(
        self, step: int, order_of: Callable[[int], RolloutOrder] | None
    ) -> tuple[RolloutOrder, list[Completion]]:
        """The order of a step with its completions, which are rank 0's; `order_of` says there what a step asks for."""
        if step == self._begun_at or step + self._staleness < self._stop:
            self._rollouts.publish()
        told, completions = None, list[Completion]()
        if order_of is not None:
            for later in range(step, min(step + self._staleness + 1, self._stop), self._passes):
                if later not in self._ahead:
                    self._ahead[later] = self._begun(later, step, order_of(later))
            self._ahead = {number: one for number, one in self._ahead.items() if number >= step}
            one = self._ahead[step]
            part = one.wait(self._ranks.still)
            completions = list(part.completions)
            self.metrics = {**one.metrics, STALENESS: float(step - one.sampled_at)}
            told = msgspec.msgpack.encode(RolloutOrder((), one.order.stop_ids, part.fault))
        return decode_order(self._ranks.broadcast(told)), completions

    def position(self, position: bytes, step: int) -> bytes:
        """Where in the data `step` begins, with what was sampled ahead of it, as rank 0 alone knows it; b"" elsewhere.

        It is long, and one more rank gets it: that which has a copy of rank 0's state. Every rank calls it, and the
        others wait as rank 0 does.
        """
        if not self._is_first:
            self._ranks.meet()
            return b""
        try:
            ahead = self.state(step, self._ranks.still)
        finally:
            self._ranks.meet()
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(position), **ahead})

    def state(self, step: int, still: Still = nobody) -> dict[str, Any]:
        """What was sampled for `step` and those after it, as JSON holds it. Waits for it."""
        kept, faults = [one for one in self._kept.values() if one.step >= step], list[int]()
        for number, one in sorted(self._ahead.items()):
            if number < step:
                continue
            if (faults and not one.is_over) or (part := one.wait(still)).fault is not None:
                faults.append(number)
                continue
            text = base64.b64encode(msgspec.msgpack.encode(part)).decode()
            kept.append(KeptStep(number, one.sampled_at, text, _digest(one.order)))
        if faults:
            log.warning(
                "what is kept of step %d lacks completions of step %s: they could not be sampled. A run that goes on "
                "samples them with the weights of step %d",
                step,
                " and ".join(str(number + 1) for number in faults),
                step,
            )
        return {"ahead": msgspec.to_builtins(kept)}

    def restore(self, kept: list[dict[str, Any]]) -> None:
        """Go on with what `state` kept."""
        steps = msgspec.convert(kept, list[KeptStep])
        self._kept = {one.step: one for one in steps if one.step - one.sampled_at <= self._staleness}

    def close(self) -> None:
        """End the thread that samples turns, once the servers are let go."""
        if self._turns is not None:
            self._turns.close()

    def _begun(self, later: int, step: int, order: RolloutOrder) -> StepAhead:
        """Take up what was kept of step `later`, or ask for it at step `step`."""
        kept = self._kept.pop(later, None)
        if order.fault is not None or not any(order.groups):
            return StepAhead(step, order, found=SampledPart(fault=order.fault))
        if kept is None:
            if self._turns is not None:
                return StepAhead(step, order, self._turns.ask(order))
            return StepAhead(step, order, self._rollouts.ask(groups_of(order), order.stop_ids, self._sampling))
        if kept.asked != _digest(order):
            lack = (
                f"the save's completions of step {later + 1} are of other prompts than the job asks for now",
                "set num_generations, global_batch_size and seed back, or begin a new run from the weights of this one",
            )
            return StepAhead(step, order, found=SampledPart(fault=lack))
        part = decode_part(base64.b64decode(kept.part))
        if self._turns is not None:
            try:
                self._turns.take_up(order, part.completions)
            except ConfigError as error:
                part = SampledPart(fault=(error.message, error.hint))
        return StepAhead(kept.sampled_at, order, found=part)


class PositionAhead:
    """A `DataPosition`: the place in the prompts, and what was sampled ahead of it."""

    def __init__(self, prompts: PromptBatches, ahead: SampledAhead) -> None:
        self._prompts, self._ahead = prompts, ahead

    def state(self, step: int) -> dict[str, Any]:
        """The state from which `step` comes next, as JSON holds it."""
        return {**self._prompts.state(step), **self._ahead.state(step)}

    def restore(self, state: dict[str, Any]) -> int:
        """Go on from a state, also from one in which nothing was sampled ahead; returns the step that comes next."""
        self._ahead.restore(state.get("ahead", []))
        return self._prompts.restore(state)


def _digest(order: RolloutOrder) -> str:
    """Of the prompts and seeds, however they are dealt."""
    return hashlib.sha256(msgspec.msgpack.encode(groups_of(order))).hexdigest()
