"""Weights that files keep in another form are read by their boxes, decoded and put where plain ones would be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tllm.core.errors import WeightsError
from tllm.parallel.quantized_weight import PackedRows, QuantizedWeight
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.quantization.blocks import Blocks, Scheme, dequantize
from tllm.quantization.stored_tensor import Box
from tllm.spec.quantized.weight_form import Quantize
from tllm.weights import load as loading
from tllm.weights import load_packed
from tllm.weights.boxes import whole
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.rounded_tensor import RoundedExpert, RoundedTensor
from tllm.weights.load import load
from tllm.weights.load_packed import PackedTask
from tllm.weights.safetensors_index import Index

SCHEME = Scheme(4, 32, offset=8)
ROWS, COLUMNS = 24, 96


class NibblePairs:
    """Two codes of neighbouring columns a byte, a scale for each 32 columns: as simple as a format can be."""

    shape = (ROWS, COLUMNS)
    scheme = SCHEME

    def aligned(self, box: Box) -> Box:
        rows, (start, stop) = box
        return rows, (start // 32 * 32, -(-stop // 32) * 32)

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        rows, (start, stop) = box
        return {"w.codes": (rows, (start // 2, stop // 2)), "w.scales": (rows, (start // 32, stop // 32))}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks:
        packed = planes["w.codes"]
        return Blocks(SCHEME, torch.stack((packed & 15, packed >> 4), -1).flatten(1), planes["w.scales"])


@pytest.fixture
def files(tmp_path: Path) -> tuple[LocalFiles, Tensor]:
    """A folder with one such weight, and the numbers that it stands for."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
    scales = torch.rand(ROWS, COLUMNS // 32)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    save_file({"w.codes": packed, "w.scales": scales, "other": torch.ones(2)}, str(tmp_path / "model.safetensors"))
    return LocalFiles(tmp_path), (codes.float() - 8) * scales.repeat_interleave(32, 1)


class Holder(nn.Module):
    def __init__(self, box: Box) -> None:
        super().__init__()
        shape = tuple(stop - start for start, stop in box)
        self.weight = cut_parameter(shape, Shard((ShardPiece("w", box),)))


@pytest.mark.parametrize("box", [((0, 24), (0, 96)), ((3, 17), (0, 96)), ((0, 24), (32, 64)), ((5, 9), (33, 95))])
@pytest.mark.parametrize("chunk", [64, loading.CHUNK_BYTES])
def test_any_box_is_read_in_parts(
    files: tuple[LocalFiles, Tensor], box: Box, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "CHUNK_BYTES", chunk)
    source, wanted = files
    index = Index(Index.read(source).entries, {"w": NibblePairs()})
    model = Holder(box)
    before = source.bytes_read
    load(model, index, source, torch.float32)
    (a, b), (c, d) = box
    assert torch.equal(model.weight, wanted[a:b, c:d])
    wide = -(-d // 32) * 32 - c // 32 * 32
    assert source.bytes_read - before == (b - a) * (wide // 2 + wide // 32 * 4)


@pytest.mark.parametrize("box", [((0, 24), (0, 96)), ((3, 24), (32, 64)), ((0, 24), (40, 72)), ((5, 9), (33, 95))])
@pytest.mark.parametrize("at_once", [1, load_packed.READ_AT_ONCE])
def test_any_box_is_packed_in_parts(
    files: tuple[LocalFiles, Tensor], box: Box, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of outputs after the first go behind it, and columns that begin in mid-group have the group's scale."""
    monkeypatch.setattr(load_packed, "READ_AT_ONCE", at_once)
    source, wanted = files
    (a, b), (c, d) = box
    task = PackedTask("w", box, torch.float32, torch.device("cpu"))
    parts = list(task.fill(Index(Index.read(source).entries, {"w": NibblePairs()}), source))
    assert len(parts) == (2 if b - a > 16 and at_once == 1 else 1) and isinstance(task.part, PackedRows)
    assert torch.equal(QuantizedWeight([task.part], d - c).rows(torch.arange(b - a)), wanted[a:b, c:d])


def test_parts_of_blocks_stand_for_parts_of_the_weight() -> None:
    torch.manual_seed(0)
    scheme = Scheme(8, 16, super_group=64)
    blocks = Blocks(
        scheme,
        torch.randint(0, 256, (4, 256), dtype=torch.uint8),
        torch.randint(-128, 128, (4, 16), dtype=torch.int8),
        torch.rand(4, 4).half(),
        minima=torch.randint(0, 64, (4, 16), dtype=torch.uint8),
        super_minima=torch.rand(4, 4).half(),
    )
    whole = dequantize(blocks)
    assert torch.equal(dequantize(blocks.narrow(-1, 64, 192)), whole[:, 64:192])
    assert torch.equal(dequantize(blocks.narrow(-2, 1, 3)), whole[1:3])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [torch.nan, -torch.inf])
def test_a_weight_that_is_no_number_is_not_rounded_to_one(kind: Quantize, wrong: float) -> None:
    weights = torch.randn(2, 64, 16)
    weights[1, 40, 3] = wrong
    matrix, expert = RoundedTensor("w", (64, 16), kind), RoundedExpert("w", (16, 64), kind, 1)
    for stored, plane in ((matrix, weights[1]), (expert, weights[1:])):
        with pytest.raises(WeightsError, match="w: a weight is not a finite number"):
            stored.decode(whole(stored.shape), {"w": plane})


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_of_no_rows_none_are_rounded(kind: Quantize) -> None:
    blocks = RoundedTensor("w", (64, 32), kind).decode(((0, 0), (0, 32)), {"w": torch.empty(0, 32)})
    assert blocks.codes.shape[0] == 0
