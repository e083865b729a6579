"""Kernels read and write nothing beyond what they are given: behind each tensor is a page that nobody may touch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.support.models.few_bits import KINDS, libraries, name_of, ways
from tests.support.models.guarded_memory import GuardedMemory
from tllm.kernels.library import DTYPE_NUMBERS, LANES, DrawArguments, Library, WeightPartArguments
from tllm.kernels.product_ways import ROW_WAYS, Way
from tllm.parallel.quantized_weight import PackedRows, _multiply
from tllm.quantization.packed_layout import PackedTensors, pack

OUTPUTS = 150
"""More than are read side by side, with a part of a block."""


@pytest.mark.parametrize("way", ways(), ids=name_of)
@pytest.mark.parametrize("kind", ["rounded_to_4", "rounded_to_8", "groups_of_16", "four_bits_and_minima"])
def test_products_of_few_bits(kind: str, way: tuple[Library, Way]) -> None:
    kernels, asked = way
    for columns, rows in ((24, 1), (48, 1), (48, 5), (48, 9), (48, 17), (48, 150)):
        blocks = KINDS[kind](OUTPUTS, columns)
        for y_dtype in (torch.float32, torch.float64):
            with GuardedMemory() as memory:
                tensors = PackedTensors(**{name: memory.copy(x) for name, x in pack(blocks).named().items()})
                arguments = PackedRows(tensors, blocks.scheme, OUTPUTS, columns).arguments()
                scratch = torch.empty(kernels.quantized.scratch_bytes(rows, arguments.padded), dtype=torch.uint8)
                x, y = torch.randn(rows, columns), torch.full((rows, OUTPUTS), torch.nan, dtype=y_dtype)
                part = (WeightPartArguments * 1)(WeightPartArguments(arguments, 0, 0))
                x, y, scratch = (memory.copy(one) for one in (x, y, scratch))
                _multiply(kernels, part, torch.tensor((0, rows)), x, y, scratch, asked)
                assert y.isfinite().all()


@pytest.mark.parametrize("way", ROW_WAYS.values(), ids=ROW_WAYS)
@pytest.mark.parametrize("kernels", libraries(), ids=lambda one: one.instruction_set.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_of_plain_numbers(dtype: torch.dtype, way: Way, kernels: Library) -> None:
    for rows, outputs, columns in ((1, 1, 1), (1, 101, 700), (3, 7, 15), (8, 49, 47), (17, 101, 700)):
        with GuardedMemory() as memory:
            scratch = memory.copy(torch.empty(rows * -(-columns // LANES) * LANES))
            weight, x = (memory.copy(torch.ones(one, columns, dtype=dtype)) for one in (outputs, rows))
            y, number = memory.copy(torch.full((rows, outputs), torch.nan, dtype=dtype)), DTYPE_NUMBERS[dtype]
            kernels.float_matmul(
                *(weight.data_ptr(), number, outputs, columns, x.data_ptr(), number, rows),
                *(y.data_ptr(), number, scratch.data_ptr(), way, 1),
            )
            assert (y == torch.tensor(columns, dtype=dtype)).all()


@pytest.mark.parametrize("kernels", libraries(), ids=lambda one: one.instruction_set.name)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 37])
def test_draws(width: int, kernels: Library) -> None:
    rows = 3
    with GuardedMemory() as memory:
        numbers = torch.ones(rows, dtype=torch.float64)
        held = {
            "logits": torch.randn(rows, width),
            "temperatures": numbers,
            "least": -numbers,
            "top_p": 0.9 * numbers,
            "seeds": torch.arange(rows),
            "positions": torch.arange(rows),
            "scratch": torch.empty(-(-width // 16) * 16),
            "ids": torch.full((rows,), -1),
        }
        guarded = {name: memory.copy(x) for name, x in held.items()}
        addresses = {name: x.data_ptr() for name, x in guarded.items()}
        arguments = DrawArguments(**addresses, rows=rows, width=width, stride=width)
        kernels.gumbel_max(ctypes.byref(arguments), 1)
        assert all(0 <= token < width for token in guarded["ids"].tolist())
