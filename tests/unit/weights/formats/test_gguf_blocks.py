"""Every type of block stands for the numbers that `gguf.quants` and transformers make of it, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from transformers.integrations.gguf import dequant

from tests.support.models.gguf_models import random_blocks
from tllm.core.gguf_header import BLOCK_TYPES
from tllm.quantization.blocks import dequantize
from tllm.weights.formats import gguf_blocks
from tllm.weights.formats.gguf_blocks import SCHEMES, blocks_of

ROWS, COLUMNS = 24, 1024


def raw_of(kind: str) -> np.ndarray:
    return random_blocks(kind, ROWS, COLUMNS, np.random.default_rng(1))


@pytest.mark.parametrize("kind", SCHEMES)
def test_numbers_equal_the_reference_to_the_bit(kind: str) -> None:
    raw = raw_of(kind)
    blocks = blocks_of(kind, torch.from_numpy(raw))
    got = dequantize(blocks).numpy()
    want = gguf.quants.dequantize(raw, GGMLQuantizationType[kind])
    assert np.isfinite(want).all()
    assert want.std() > 0.1
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    number = GGMLQuantizationType[kind].value
    if number in dequant.GGML_BLOCK:
        theirs = dequant.dequantize(torch.from_numpy(raw), number, torch.float32).reshape(ROWS, COLUMNS).numpy()
        assert np.array_equal(got.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("kind", SCHEMES)
def test_planes_are_as_small_as_the_scheme_says(kind: str) -> None:
    scheme, blocks = SCHEMES[kind], blocks_of(kind, torch.from_numpy(raw_of(kind)))
    assert blocks.scheme is scheme
    assert blocks.codes.shape == (ROWS, COLUMNS)
    assert int(blocks.codes.max()) < 1 << scheme.bits
    assert blocks.scales.shape == (ROWS, COLUMNS // scheme.group)
    assert blocks.scales.dtype.itemsize == (1 if scheme.super_group or scheme.exponents else 2)
    assert (blocks.super_scales is not None) == bool(scheme.super_group)
    assert scheme.table is None or all(0 <= value <= 255 for value in scheme.table)
    for part in (blocks.minima, blocks.super_minima):
        assert part is None or part.shape[0] == ROWS
    # Any row and any block can be decoded alone.
    known = {each.name: each for each in BLOCK_TYPES.values()}[kind]
    one = blocks_of(kind, torch.from_numpy(raw_of(kind))[5:6, known.nbytes : 3 * known.nbytes])
    assert torch.equal(dequantize(one), dequantize(blocks)[5:6, known.elements : 3 * known.elements])


def test_every_exponent_of_mxfp4() -> None:
    raw = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 17, axis=1)
    got = dequantize(blocks_of("MXFP4", torch.from_numpy(raw))).numpy()
    with np.errstate(over="ignore"):
        want = gguf.quants.dequantize(raw, GGMLQuantizationType.MXFP4)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_sizes_of_types_are_those_of_gguf() -> None:
    for number, kind in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.elements, kind.nbytes), kind
        assert GGMLQuantizationType(number).name == kind.name
    assert set(BLOCK_TYPES) == {kind.value for kind in GGMLQuantizationType}


def test_the_reference_sees_swapped_nibbles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: with high halves first nothing is equal any more."""
    monkeypatch.setattr(gguf_blocks, "_nibbles", lambda qs: torch.cat((qs >> 4, qs & 15), -1))
    with pytest.raises(AssertionError):
        test_numbers_equal_the_reference_to_the_bit("Q4_0")


def test_the_reference_sees_a_neighbours_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gguf_blocks._six_bits
    monkeypatch.setattr(gguf_blocks, "_six_bits", lambda sc: tuple(x.roll(1, -1) for x in real(sc)))
    with pytest.raises(AssertionError):
        test_numbers_equal_the_reference_to_the_bit("Q4_K")
