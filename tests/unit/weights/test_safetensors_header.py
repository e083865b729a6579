"""One file's header: what the safetensors library writes is read, and each lie is refused with the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tllm.core.errors import WeightsError
from tllm.weights.byte_source import LocalFiles
from tllm.weights.dtypes import DTYPES
from tllm.weights.safetensors_header import read_header
from tllm.weights.safetensors_index import Index

FILE = "model.safetensors"


def write(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> LocalFiles:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / FILE).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return LocalFiles(folder)


def tensor(start: int = 0, stop: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_dtype_as_the_library_writes_it(tmp_path: Path, dtype: torch.dtype) -> None:
    want = torch.arange(24).remainder(2 if dtype is torch.bool else 24).to(dtype).view(2, 3, 4)
    save_file({"x": want, "scalar": want[0, 0, 1].clone(), "none": want[:0].clone()}, tmp_path / FILE)
    source = LocalFiles(tmp_path)
    index = Index.read(source)
    assert {name: index.shape(name) for name in index.entries} == {"x": (2, 3, 4), "scalar": (), "none": (0, 3, 4)}
    for name, expected in {"x": want, "scalar": want[0, 0, 1], "none": want[:0]}.items():
        got = index.slice(source, name)
        assert (got.dtype, got.shape) == (dtype, expected.shape)
        assert torch.equal(got.view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))


def test_a_file_that_git_left_out_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665bdf4e2\nsize 4939116424\n")
    with pytest.raises(WeightsError, match=r"model\.safetensors is a pointer of Git LFS") as caught:
        read_header(LocalFiles(tmp_path), FILE)
    assert "git lfs pull" in caught.value.hint


LIES: dict[str, tuple[Any, bytes, str]] = {
    "not json": (b"{nonsense", b"", "not JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "not JSON"),
    "too deep": (b'{"a":' + b"[" * 200_000, b"", "not JSON"),
    "a list": ([1], b"", "list and not a table"),
    "an endless number": (b'{"a": ' + b"9" * 5000 + b"}", b"", "not JSON"),
    "the same key twice": (b'{"a": {}, "a": {}}', b"", "'a' 2 times"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 4]}}, bytes(4), "must have dtype"),
    "an unknown key": ({"a": tensor() | {"more": 1}}, bytes(8), "must have dtype"),
    "an unknown dtype": ({"a": tensor(dtype="F33")}, bytes(8), "F33.*\n.*F32"),
    "a dtype that is a list": ({"a": tensor(dtype=[])}, bytes(8), "dtype"),
    "a negative width": ({"a": tensor(shape=[-2])}, bytes(8), "shape"),
    "a width of True": ({"a": tensor(0, 4, shape=[True])}, bytes(4), "shape"),
    "a width of 2.0": ({"a": tensor(shape=[2.0])}, bytes(8), "shape"),
    "a width of 2^64": ({"a": tensor(shape=[2**64])}, bytes(8), "shape"),
    "a product that overflows": ({"a": tensor(shape=[2**33, 2**31])}, bytes(8), "memory can address"),
    "an overflow hidden by 0": ({"a": tensor(0, 0, shape=[0, 2**40, 2**40])}, b"", "memory can address"),
    "an overflow that wraps to right": ({"a": tensor(0, 4, shape=[2**62 + 1, 1])}, bytes(4), "memory can address"),
    "too many dims": ({"a": tensor(0, 4, shape=[1] * 17)}, bytes(4), "16"),
    "a shape that is too large": ({"a": tensor(shape=[3])}, bytes(8), "takes 12 bytes and its offsets give it 8"),
    "a shape that is too small": ({"a": tensor(shape=[1])}, bytes(8), "takes 4 bytes and its offsets give it 8"),
    "offsets backwards": ({"a": tensor(8, 0)}, bytes(8), "data_offsets"),
    "three offsets": ({"a": tensor() | {"data_offsets": [0, 4, 8]}}, bytes(8), "data_offsets"),
    "a negative offset": ({"a": tensor(-8, 0)}, bytes(8), "data_offsets"),
    "offsets past the end": ({"a": tensor()}, bytes(7), "the file has"),
    "an overlap": ({"a": tensor(), "b": tensor(4, 12)}, bytes(12), "inside 'a'"),
    "the same bytes twice": ({"a": tensor(), "b": tensor()}, bytes(8), "inside 'a'"),
    "a hole": ({"a": tensor(), "b": tensor(12, 20)}, bytes(20), "belong to no tensor"),
    "a hole at the start": ({"a": tensor(4, 12)}, bytes(12), "belong to no tensor"),
    "more at the end": ({"a": tensor()}, bytes(9), "the file has"),
}


@pytest.mark.parametrize(("header", "data", "match"), LIES.values(), ids=LIES.keys())
def test_lies(tmp_path: Path, header: Any, data: bytes, match: str) -> None:
    source = write(tmp_path, header, data)
    with pytest.raises(WeightsError, match=match) as caught:
        read_header(source, FILE)
    assert FILE in caught.value.message


@pytest.mark.parametrize("length", [3, 10**8 + 1, 2**63, 2**64 - 1, 60])
def test_a_header_length_that_lies(tmp_path: Path, length: int) -> None:
    source = write(tmp_path, {"a": tensor()}, length=length)
    with pytest.raises(WeightsError, match=FILE):
        read_header(source, FILE)
    assert source.bytes_read <= 8 + 60, "nothing is allocated or read on the header's word"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_every_truncation_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    content = save({"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)})
    (tmp_path / FILE).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(WeightsError, match=FILE):
        read_header(LocalFiles(tmp_path), FILE)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_header_never_reads_outside(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(save({"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / FILE).write_bytes(content)
    try:
        entries = read_header(LocalFiles(tmp_path), FILE)
    except WeightsError:
        return
    assert all(0 <= entry.start <= entry.stop <= len(content) for entry in entries.values())
