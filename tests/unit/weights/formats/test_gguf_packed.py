"""GGUF blocks as the kernels hold them: what they stand for, and the bits that the planner counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference

from tllm.quantization.packed_layout import pack, unpack_rows
from tllm.quantization.reference_matmul import reference_matmul, round_rows
from tllm.spec.gguf.gguf_codings import CODINGS
from tllm.weights.formats.gguf_blocks import BLOCK_BYTES, SCHEMES, blocks_of

ROWS, COLUMNS = 32, 512


def random_blocks(kind: str) -> torch.Tensor:
    """Rows of blocks with random codes, whose numbers of 16 bits are small and finite."""
    torch.manual_seed(0)
    nbytes = BLOCK_BYTES[kind]
    elements = 256 if SCHEMES[kind].super_group else 32
    data = torch.randint(0, 256, (ROWS, COLUMNS // elements, nbytes), dtype=torch.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)}
    for at in halves.get(kind, (208,) if kind == "Q6_K" else () if kind == "MXFP4" else (0,)):
        some = (torch.rand(ROWS, COLUMNS // elements, 1) + 0.1).half().view(torch.uint8)
        data[..., at : at + 2] = some.view(ROWS, COLUMNS // elements, 2)
    if kind == "MXFP4":
        data[..., 0] = torch.randint(118, 130, data[..., 0].shape, dtype=torch.uint8)
    return data.flatten(1)


def test_every_type_that_is_read_is_counted() -> None:
    assert set(CODINGS) == set(SCHEMES)


@pytest.mark.parametrize("kind", SCHEMES)
def test_packed_blocks_stand_for_the_same_numbers_in_the_bits_that_are_counted(kind: str) -> None:
    data = random_blocks(kind)
    packed, scheme = pack(blocks_of(kind, data)), SCHEMES[kind]
    want = torch.from_numpy(reference(data.numpy(), GGMLQuantizationType[kind]).astype(np.float32))
    assert torch.equal(unpack_rows(packed, scheme, torch.arange(ROWS), COLUMNS), want)
    bits = 8 * sum(x.nbytes for x in packed.named().values()) / (ROWS * COLUMNS)
    assert bits == pytest.approx(CODINGS[kind].held_bits(COLUMNS), abs=1e-9)


@pytest.mark.parametrize("kind", SCHEMES)
def test_products_are_those_of_the_numbers(kind: str) -> None:
    data = random_blocks(kind)
    want = torch.from_numpy(reference(data.numpy(), GGMLQuantizationType[kind]).astype(np.float64))
    x = torch.randn(3, COLUMNS)
    codes, scales = round_rows(x)
    rounded = codes.double() * scales.double().repeat_interleave(32, 1)
    found = reference_matmul(x, pack(blocks_of(kind, data)), SCHEMES[kind], ROWS).double()
    size = rounded.abs() @ want.abs().T
    assert ((found - rounded @ want.T).abs() / size).max() < 2e-6
