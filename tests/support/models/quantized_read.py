"""Reads weights of quantised folders with the package's own loader."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tllm.quantization.blocks import Blocks
from tllm.quantization.stored_tensor import Box
from tllm.spec.hf_config import read_config
from tllm.weights.boxes import whole
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load, read_piece, read_stored
from tllm.weights.safetensors_index import Index


def read_blocks(index: Index, source: LocalFiles, name: str, box: Box) -> Blocks | Tensor:
    """What the aligned box of a box holds of a weight that the files keep in another form."""
    return read_stored(name, index.stored[name], box, index, source)[0]


def opened(folder: Path) -> tuple[Index, LocalFiles]:
    source = LocalFiles(folder)
    return open_index(source, read_config(folder)), source


def weight(folder: Path, name: str, box: Box = ()) -> Tensor:
    """A box of a weight as float32, by the bytes that a rank would read for it."""
    index, source = opened(folder)
    stored = index.stored[name]
    found = read_blocks(index, source, name, box or whole(stored.shape))
    if isinstance(found, Blocks):
        assert found.scheme == stored.scheme
        assert found.codes.dtype == torch.uint8 and int(found.codes.max()) < 1 << found.scheme.bits
    else:
        assert stored.scheme is None
    return read_piece(name, box, index, source)


def fast_load(model: nn.Module, folder: Path) -> None:
    """Fill a model as the engine does."""
    index, source = opened(folder)
    load(model, index, source)
