"""Random weights in few bits, of every kind that a format can have, and the kernels of every instruction set here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tllm.kernels import library
from tllm.kernels.library import Library, compiled, path_of
from tllm.kernels.product_ways import Way
from tllm.parallel import quantized_weight
from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.round_weights import round_weights

TABLE = tuple(x + 128 for x in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
SMALL_TABLE = tuple(x + 12 for x in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


def _bytes(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


def _groups(columns: int, group: int) -> int:
    return -(-columns // group)


def four_bits_and_minima(rows: int, columns: int) -> Blocks:
    """As GGUF's Q4_K."""
    groups, supers = _groups(columns, 32), _groups(columns, 256)
    return Blocks(
        Scheme(4, 32, super_group=256),
        _bytes(0, 16, rows, columns),
        _bytes(0, 64, rows, groups),
        torch.rand(rows, supers).half(),
        minima=_bytes(0, 64, rows, groups),
        super_minima=torch.rand(rows, supers).half(),
    )


def groups_of_16(rows: int, columns: int) -> Blocks:
    """As GGUF's Q6_K."""
    return Blocks(
        Scheme(8, 16, offset=32, super_group=256),
        _bytes(0, 64, rows, columns),
        _bytes(-128, 128, rows, _groups(columns, 16), dtype=torch.int8),
        torch.rand(rows, _groups(columns, 256)).half(),
    )


def zeros_of_groups(rows: int, columns: int) -> Blocks:
    """As AWQ."""
    groups = _groups(columns, 128)
    scales = torch.rand(rows, groups).half()
    return Blocks(Scheme(4, 128), _bytes(0, 16, rows, columns), scales, zeros=_bytes(0, 16, rows, groups))


def by_table(rows: int, columns: int) -> Blocks:
    """As GGUF's IQ4_NL."""
    scales = torch.rand(rows, _groups(columns, 32)).half()
    return Blocks(Scheme(4, 32, offset=128, table=TABLE), _bytes(0, 16, rows, columns), scales)


def by_small_table(rows: int, columns: int) -> Blocks:
    """As MXFP4."""
    scheme = Scheme(4, 32, offset=12, table=SMALL_TABLE, exponents=True)
    return Blocks(scheme, _bytes(0, 16, rows, columns), _bytes(119, 131, rows, _groups(columns, 32)))


def scale_of_row(rows: int, columns: int) -> Blocks:
    """As compressed-tensors by channel."""
    return Blocks(Scheme(8, 2**30, offset=128), _bytes(0, 256, rows, columns), torch.rand(rows, 1).bfloat16())


def float8_in_blocks(rows: int, columns: int) -> Blocks:
    """As FP8 folders: numbers of every size, the least ones too."""
    codes = _bytes(0, 127, rows, columns) | _bytes(0, 2, rows, columns) << 7
    return Blocks(Scheme(8, 128, code="float8_e4m3"), codes, torch.rand(rows, _groups(columns, 128)))


def float8_by_row(rows: int, columns: int) -> Blocks:
    """With a scale for each row, as compressed-tensors by channel."""
    return replace(
        float8_in_blocks(rows, columns), scheme=Scheme(8, columns, code="float8_e4m3"), scales=torch.rand(rows, 1)
    )


def rounded_to_8(rows: int, columns: int) -> Blocks:
    return round_weights(torch.randn(rows, columns), "int8")


def rounded_to_4(rows: int, columns: int) -> Blocks:
    return round_weights(torch.randn(rows, columns), "int4")


KINDS: dict[str, Callable[[int, int], Blocks]] = {
    made.__name__: made
    for made in (
        *(four_bits_and_minima, groups_of_16, zeros_of_groups, by_table, by_small_table, scale_of_row),
        *(float8_in_blocks, float8_by_row, rounded_to_8, rounded_to_4),
    )
}


def libraries() -> list[Library]:
    """The kernels of each instruction set that this processor has."""
    return [Library(one, path_of(one)) for one in compiled()]


def ways() -> list[tuple[Library, Way]]:
    """The ways to make a product: the kernels of each instruction set, by vectors and, if they have tiles, by tiles.

    By vectors single rows have blocks side by side, and those that are left over one by one.
    """
    return [(one, way) for one in libraries() for way in (Way.SIDE_BY_SIDE, Way.BY_TILES)[: 1 + one.has_tiles]]


def take(way: tuple[Library, Way], monkeypatch: pytest.MonkeyPatch) -> Library:
    """Let all products be made so."""
    kernels, asked = way
    monkeypatch.setattr(library, "loaded", lambda: kernels)
    monkeypatch.setattr(quantized_weight, "multiply_packed", lambda *arguments: arguments[-1](asked))
    return kernels


def name_of(way: tuple[Library, Way]) -> str:
    return way[0].instruction_set.name + " tiles" * (way[1] == Way.BY_TILES)
