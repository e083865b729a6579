"""Learning rates by step, under the names and formulas of Hugging Face's schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tllm.core.errors import ConfigError, counted, nearest

Shape = Callable[["LearningRateSchedule", int], float]

ONE_FALL = 0.5
"""Waves of a cosine that goes down once."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """`kind` over `max_steps` steps, of which the first `warmup_steps` rise.

    `decay_steps` are the last ones of warmup_stable_decay. `cycles` is how many waves a cosine makes (a half goes from
    1 to 0), `floor` the smallest factor of the kinds that have cosines.
    """

    kind: str
    max_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    cycles: float = ONE_FALL
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            hint = ELSEWHERE.get(self.kind) or nearest(self.kind, SHAPES)
            raise ConfigError(f"lr_scheduler_type {self.kind!r} is not known", hint)
        if self.warmup_steps and self.kind == "constant":
            raise ConfigError(
                f"lr_scheduler_type constant has no warm-up, and warmup_steps is {self.warmup_steps}",
                "take constant_with_warmup",
            )
        if self.decay_steps and self.kind != "warmup_stable_decay":
            raise ConfigError(
                f"lr_scheduler_type {self.kind} has no decay of its own, and {self.decay_steps} decay steps are given",
                "only warmup_stable_decay has",
            )
        for name, asked in (("min_lr_ratio", self.floor), ("num_cycles", self.cycles - ONE_FALL)):
            if asked and self.kind not in WAVES:
                raise ConfigError(
                    f"lr_scheduler_type {self.kind} has no cosine, and {name} is given",
                    f"take {' or '.join(WAVES)}, or leave {name} out",
                )
        if self.warmup_steps + self.decay_steps > self.max_steps:
            raise ConfigError(
                f"{self.warmup_steps} warm-up and {counted(self.decay_steps, 'decay step')} are more than all "
                f"{self.max_steps}",
                "lower warmup_steps, or raise max_steps",
            )

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at a step, the first being 0."""
        if step < self.warmup_steps:
            lowest = self.floor if self.kind == "warmup_stable_decay" else 0.0
            return step / self.warmup_steps * (1.0 - lowest) + lowest
        return SHAPES[self.kind](self, step)


def _constant(schedule: LearningRateSchedule, step: int) -> float:
    return 1.0


def _linear(schedule: LearningRateSchedule, step: int) -> float:
    return max(0.0, 1.0 - _progress(schedule, step))


def _cosine(schedule: LearningRateSchedule, step: int) -> float:
    return _wave(schedule, _progress(schedule, step))


def _stable_then_decay(schedule: LearningRateSchedule, step: int) -> float:
    """Constant, then half a cosine wave down over the last `decay_steps` (2404.06395)."""
    left = schedule.max_steps - schedule.decay_steps
    if step < left:
        return 1.0
    return schedule.floor if step >= schedule.max_steps else _wave(schedule, (step - left) / schedule.decay_steps)


def _progress(schedule: LearningRateSchedule, step: int) -> float:
    return (step - schedule.warmup_steps) / max(1, schedule.max_steps - schedule.warmup_steps)


def _wave(schedule: LearningRateSchedule, progress: float) -> float:
    height = 0.5 * (1.0 + math.cos(math.pi * schedule.cycles * 2.0 * progress))
    return max(0.0, height * (1.0 - schedule.floor) + schedule.floor)


SHAPES: dict[str, Shape] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "warmup_stable_decay": _stable_then_decay,
}

WAVES = ("cosine", "warmup_stable_decay")
"""Those that fall along a cosine: as often as `cycles` says, and no lower than `floor`."""

_WITH_FLOOR = 'take "cosine", and give min_lr_ratio'
ELSEWHERE = {
    "cosine_with_min_lr": _WITH_FLOOR,
    "cosine_warmup_with_min_lr": _WITH_FLOOR,
    "cosine_with_restarts": 'take "cosine": num_cycles of 1.5 falls, rises and falls again',
    "polynomial": 'take "linear", which is a polynomial of power 1',
    "inverse_sqrt": 'take "warmup_stable_decay", which holds the rate and lets it fall at the end',
    **dict.fromkeys(("reduce_lr_on_plateau", "greedy"), 'take "cosine": rates hang on steps alone here, not on losses'),
}
"""Names of transformers' schedules that are not here, and what stands in their place."""
