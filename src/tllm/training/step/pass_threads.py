"""How many threads torch has in a pass over the layers: one, where a job asks for the same bits whatever there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tllm.devices.choose import CPU
from tllm.kernels.library import torch_by_one_thread
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


def with_same_bits(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
    """The method, whose bits do not hang on the number of threads if the job is `deterministic` and the processor
    computes."""

    @wraps(method)
    def of_rank(self: H, /, *args: P.args, **named: P.kwargs) -> R:
        is_held = self._config.job.deterministic and self._config.device == CPU
        with same_bits(is_held):
            return method(self, *args, **named)

    return of_rank
