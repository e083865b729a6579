"""What chunks hold is said in words that their file's header gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.house.tree import ROOT
from tests.support.models.gguf_models import SavedModel, write_gguf
from tllm.core.gguf_header import read_gguf_header
from tllm.node.weights.chunk_contents import contents
from tllm.node.weights.model_folder import ModelFolder
from tllm.weights.byte_source import LocalFiles

FILE, SIZE = "model.safetensors", 1000


@pytest.fixture
def source(tmp_path: Path) -> LocalFiles:
    """Tensors of `SIZE` bytes each; chunks are as long in the tests, so that tensor n lies in chunks n and n + 1."""
    names = [*(f"model.layers.{n}.x" for n in (0, 1, 2, 4)), *(f"top.{letter}" for letter in "abcde")]
    data = {name: torch.zeros(SIZE, dtype=torch.uint8) for name in names}
    save_file(data, tmp_path / FILE, {"note": "x"})
    return LocalFiles(tmp_path)


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (0, 1, "layer 0"),
        (0, 3, "layers 0 to 2"),
        (1, 4, "layers 1 to 2 and layer 4"),
        (3, 5, "layer 4 and top.a"),
        (2, 6, "layer 2, layer 4, top.a and top.b"),
        (4, 9, "top.a, top.b, top.c and 2 more tensors"),
    ],
)
def test_layers_are_told_in_runs_and_a_few_tensors_by_name(
    source: LocalFiles, first: int, last: int, said: str
) -> None:
    header = source.size(FILE) - 9 * SIZE
    shifted = range(header + first * SIZE, header + last * SIZE)  # chunks of one byte: exact bounds
    assert contents(source, FILE, shifted, 1) == said


def test_a_chunk_holds_what_reaches_into_it(source: LocalFiles) -> None:
    header = source.size(FILE) - 9 * SIZE
    assert contents(source, FILE, [(header + SIZE) // 64], 64) in ("layers 0 to 1", "layer 1")
    assert contents(source, FILE, [0], 8) == "", "the header alone"


def test_of_a_gguf_file_too(tmp_path: Path) -> None:
    path = write_gguf(SavedModel(ROOT / "models" / "tiny"), tmp_path / "tiny.gguf")
    source = LocalFiles(path)
    header = read_gguf_header(path.name, path.stat().st_size, lambda *at: source.read(path.name, *at))
    tensors = [header.tensors[f"blk.{n}.ffn_up.weight"] for n in (2, 3)]
    assert contents(source, path.name, [tensor.start for tensor in tensors], 1) == "layers 2 to 3"


def test_where_the_header_cannot_be_read_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(bytes(range(256)) * 10)
    assert contents(LocalFiles(tmp_path), FILE, [0], 64) == ""
    assert ModelFolder(tmp_path).contents(FILE, [0]) == ""
