"""Whether a stage's layers over a decode batch are faster recorded or computed anew, timed on this machine.

Played layers multiply plain weights by our kernels, the only products that a recording can have: csrc/float_matmul.c,
and with AMX csrc/bfloat16_tiles.c. Computed ones take the fastest product for each weight, with Python between them.
Which of the two loses less differs between processors and models, so some layers are timed both ways, once for each
number of rows that counts as the same.
Layers in few bits have the same kernels either way, and are played; so are small ones, which are all Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import BestTimes, Choice, next_power_of_two
from tllm.model.layer import Layer
from tllm.parallel.quantized_weight import is_empty, weight_bytes

MEASURED_BYTES = 256 * 2**20
"""Of weights that the timed layers have together, if there are so many: more than a cache keeps until the next time."""

CACHED_BYTES = 4 * 2**20
"""Layers of fewer bytes of weights are played unasked: these stay in caches, and take less time than Python does."""

TURNS = 3

PLAYED, COMPUTED = "played", "computed"


class LayersKind(NamedTuple):
    """Layers that take as long: the first `layers` of a stage, of `bytes` together, for at most `rows` rows."""

    rows: int
    width: int
    layers: int
    bytes: int
    dtype: torch.dtype
    threads: int


choices = Autotuned[LayersKind]("layers of replies")


def has_plain_products(layers: list[Layer]) -> bool:
    """Whether any of their matrices has plain numbers."""
    return any(x.ndim > 1 and not is_empty(x) for layer in layers for x in layer.parameters())


def timed_layers(layers: list[Layer]) -> tuple[int, int]:
    """How many of the first ones are timed, and the bytes of their weights."""
    nbytes = 0
    for count, layer in enumerate(layers, 1):
        nbytes += sum(weight_bytes(parameter) for parameter in layer.parameters())
        if nbytes >= MEASURED_BYTES:
            return count, nbytes
    return len(layers), nbytes


def kind_of(layers: list[Layer], rows: int, width: int, dtype: torch.dtype) -> LayersKind:
    """Of a stage's layers over a batch of `rows` rows."""
    return LayersKind(next_power_of_two(rows), width, *timed_layers(layers), dtype, torch.get_num_threads())


def by_turns(ways: Mapping[str, Callable[[], object]]) -> Choice:
    """The one that has the best time of all. Each has been run before, so that its products are chosen."""
    best = BestTimes()
    for _ in range(TURNS):
        for name, run in ways.items():
            best.run(name, run)
    return best.fastest()
