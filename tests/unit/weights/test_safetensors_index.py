"""`Index` over folders: slices against the safetensors library, exact bytes, and folders that are not whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from tllm.core.errors import WeightsError
from tllm.weights.byte_source import LocalFiles, RemoteFiles
from tllm.weights.header_tables import INDEX, SINGLE
from tllm.weights.safetensors_index import Index

SHAPES = {"vector": (7,), "matrix": (6, 5), "experts": (3, 4, 5), "scalar": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors["half"] = torch.randn(9, 3).to(torch.bfloat16)
    tensors["bytes"] = torch.arange(15, dtype=torch.uint8).view(5, 3)
    save_file(tensors, path / SINGLE)
    return path


def two_files(folder: Path, **changes: str) -> Path:
    """A model in two files; `changes` bend the weight_map."""
    save_file({"a": torch.ones(2)}, folder / "1.safetensors")
    save_file({"b": torch.ones(3), "extra": torch.ones(1)}, folder / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"} | changes
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_slices_and_their_bytes(folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*SHAPES, "half", "bytes"]))
    source = LocalFiles(folder)
    index = Index.read(source)
    box = []
    for width in index.entries[name].shape:
        start = data.draw(st.integers(0, width))
        box.append((start, data.draw(st.integers(start, width))))
    with safe_open(folder / SINGLE, "pt") as oracle:
        want = oracle.get_tensor(name)[tuple(slice(*pair) for pair in box)]
    before = source.bytes_read
    got = index.slice(source, name, tuple(box))
    assert torch.equal(got, want)
    assert source.bytes_read - before == want.numel() * want.element_size()


def test_the_same_over_the_network(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    remote = RemoteFiles(lambda file, start, stop: content[start:stop], {SINGLE: len(content)})
    index = Index.read(remote)
    local = LocalFiles(folder)
    assert index == Index.read(local)
    box = ((0, 6), (1, 3))
    assert torch.equal(index.slice(remote, "matrix", box), index.slice(local, "matrix", box))
    assert remote.bytes_read == len(content), "one read ahead took all of a small file"


def test_reading_an_index_reads_headers_only(folder: Path) -> None:
    source = LocalFiles(folder)
    entries = Index.read(source).entries
    assert source.bytes_read == source.size(SINGLE) - sum(entry.nbytes for entry in entries.values())


def test_a_box_outside_its_tensor(folder: Path) -> None:
    source = LocalFiles(folder)
    index = Index.read(source)
    for box in [((0, 8),), ((0, 7), (0, 1)), ((-1, 2),), ((3, 2),)]:
        with pytest.raises(WeightsError, match=r"vector.*\(7,\)"):
            index.slice(source, "vector", box)


def test_a_missing_tensor_names_the_nearest(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"'matrixes'.*\n.*'matrix'"):
        Index.read(LocalFiles(folder)).entry("matrixes")


def test_several_files(tmp_path: Path) -> None:
    source = LocalFiles(two_files(tmp_path))
    index = Index.read(source)
    assert list(index.entries) == ["a", "b"], "the weight_map says what belongs to the model"
    assert math.prod(index.slice(source, "b").shape) == 3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"a": "2.safetensors", "extra": "1.safetensors"}, "'a' is in 2.safetensors and it is in 1.safetensors"),
        ({"c": "2.safetensors"}, "'c' is in 2.safetensors and it is in no file"),
        ({"c": "3.safetensors"}, "names '3.safetensors' and it is missing"),
        ({"c": "../secret.safetensors"}, "secret.safetensors' and it is missing"),
    ],
)
def test_a_wrong_index(tmp_path: Path, changes: dict[str, str], match: str) -> None:
    with pytest.raises(WeightsError, match=match):
        Index.read(LocalFiles(two_files(tmp_path, **changes)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (two_files(tmp_path) / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=INDEX):
        Index.read(LocalFiles(tmp_path))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"\x80")
    with pytest.raises(WeightsError, match=f"{file}.*pickle.*\n.*convert"):
        Index.read(LocalFiles(tmp_path))


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no weights: neither"):
        Index.read(LocalFiles(tmp_path))
    (tmp_path / "model.safetensors.incomplete").touch()
    with pytest.raises(WeightsError, match=r"safetensors\.incomplete was not fetched to its end"):
        Index.read(LocalFiles(tmp_path))
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightsError, match=r"no model\.safetensors\.index\.json"):
        Index.read(LocalFiles(tmp_path))
