"""What a pass over the layers must be where a job asks for the same bits everywhere: threads of torch, and plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tllm.devices.choose import CPU
from tllm.kernels.library import torch_by_one_thread
from tllm.spec.plan import Plan
from tllm.training.step.rank_groups import RankConfig

P = ParamSpec("P")
R = TypeVar("R")


class HasConfig(Protocol):
    """Who makes passes for a rank."""

    _config: RankConfig


H = TypeVar("H", bound=HasConfig)


def same_bits(is_held: bool) -> AbstractContextManager[None]:
    """A block in which a processor's bits do not hang on the number of threads, if `is_held`."""
    return torch_by_one_thread() if is_held else nullcontext()


def unlike_bits(plan: Plan | None, is_held: bool) -> str:
    """Why ranks that divide a model by a plan, None for one that has it whole, cannot answer a run whose bits `is_held`
    to those of one process, in words; "" where they can."""
    if not is_held or plan is None or all(stage.tp == 1 for stage in plan.stages):
        return ""
    return (
        f"its plan is {plan} and the run is deterministic: tensor parallelism adds parts of sums in another order than "
        "one rank does, and pp alone in the same"
    )


def with_same_bits(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
    """The method, whose bits do not hang on the number of threads if the job is `deterministic` and the processor
    computes."""

    @wraps(method)
    def of_rank(self: H, /, *args: P.args, **named: P.kwargs) -> R:
        is_held = self._config.job.deterministic and self._config.device == CPU
        with same_bits(is_held):
            return method(self, *args, **named)

    return of_rank
