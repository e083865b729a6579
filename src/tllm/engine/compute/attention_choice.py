"""Chooses how a batch with prompts attends, by measuring on this machine.

The first batch of each kind is computed in every way, and which was the fastest is kept (`kernels/autotune.py`). The
ways differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tllm.engine.schedule.batch import BatchEntry
from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice, fastest, next_power_of_two
from tllm.model.attention import AttentionSpec

Way = TypeVar("Way")


class AttentionKind(NamedTuple):
    """What is alike: `rows` and `keys` are the largest numbers, of all prompts and of one, that count as the same.

    `window`: 0 for none.
    """

    rows: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    window: int
    softcap: bool
    sinks: bool
    threads: int

    @classmethod
    def of(cls, spec: AttentionSpec, prompts: tuple[BatchEntry, ...], q_TNH: Tensor, kv_heads: int) -> AttentionKind:
        """The kind of a batch with these prompts."""
        _, heads, width = q_TNH.shape
        rows = next_power_of_two(sum(entry.count for entry in prompts))
        keys = next_power_of_two(max((entry.stop for entry in prompts), default=1))
        form = spec.window or 0, spec.softcap is not None, spec.sinks
        return cls(rows, keys, heads, kv_heads, width, q_TNH.dtype, *form, torch.get_num_threads())


choices = Autotuned[AttentionKind]("attention of prompts")


def fastest_way(kind: AttentionKind, ways: Mapping[str, Callable[[], Way]], compute: Callable[[Way], object]) -> Way:
    """The only way there is, or the one in which `compute` is fastest, measured if it is not known yet."""
    if len(ways) == 1:
        return next(iter(ways.values()))()
    choice = choices.known.get(kind) or choices.choose(kind, ways.keys(), partial(_measure, ways, compute))
    return ways[choice.name]()


def _measure(ways: Mapping[str, Callable[[], Way]], compute: Callable[[Way], object]) -> Choice:
    return fastest({name: partial(compute, make()) for name, make in ways.items()})
