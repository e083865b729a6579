"""The manifest: any changed byte is found by whoever reads it, and by nobody who does not."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tllm.core.errors import WeightsError
from tllm.weights.byte_source import LocalFiles, RemoteFiles
from tllm.weights.byte_spans import Spans
from tllm.weights.header_tables import SINGLE
from tllm.weights.manifest import MANIFEST, CheckedFiles, checked, make_manifest
from tllm.weights.safetensors_index import Index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file({"a": torch.randn(64, 256), "b": torch.randn(64, 256)}, tmp_path / SINGLE)
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(make_manifest(tmp_path, [SINGLE])))
    return tmp_path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_is_whole_reads_the_same(folder: Path) -> None:
    plain = LocalFiles(folder)
    source = checked(plain)
    assert isinstance(source, CheckedFiles)
    index = Index.read(source)
    box = ((3, 60), (100, 130))
    assert torch.equal(index.slice(source, "b", box), index.slice(LocalFiles(folder), "b", box))
    assert source.bytes_read == plain.bytes_read


def test_chunks_are_read_once_in_passing(folder: Path) -> None:
    plain = LocalFiles(folder)
    source = checked(plain)
    size, before = source.size(SINGLE), plain.bytes_read
    out = bytearray(size // 10)
    source.read_spans(SINGLE, Spans(0, 1, 10, size // 10), memoryview(out))
    assert bytes(out) == (folder / SINGLE).read_bytes()[0 : size // 10 * 10 : 10]
    assert plain.bytes_read - before == size


def test_a_flipped_byte_is_found_where_it_is_read(folder: Path) -> None:
    flip(folder / SINGLE, -1)
    source = checked(LocalFiles(folder))
    index = Index.read(source)
    index.slice(source, min(index.entries, key=lambda name: index.entries[name].start), ((0, 40), (0, 256)))
    last = max(index.entries, key=lambda name: index.entries[name].start)
    with pytest.raises(WeightsError, match=f"{SINGLE}: bytes .* are not what {MANIFEST} says"):
        index.slice(source, last)


def test_a_flipped_byte_of_the_header_and_over_the_network(folder: Path) -> None:
    flip(folder / SINGLE, 40)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    sizes = {name: len(content) for name, content in files.items()}
    source = checked(RemoteFiles(lambda file, start, stop: files[file][start:stop], sizes))
    with pytest.raises(WeightsError, match="are not what"):
        Index.read(source)


def test_a_folder_without_a_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    plain = LocalFiles(folder)
    assert checked(plain) is plain


def test_files_that_are_not_the_manifests(folder: Path) -> None:
    (folder / "other").write_bytes(b"1")
    source = checked(LocalFiles(folder))
    with pytest.raises(WeightsError, match="other is not in"):
        source.read("other", 0, 1)
    with (folder / SINGLE).open("ab") as file:
        file.write(b"1")
    with pytest.raises(WeightsError, match=f"{SINGLE} has .* bytes and {MANIFEST} says"):
        Index.read(checked(LocalFiles(folder)))


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"chunk_bytes": 0}, {"chunk_bytes": "1"}, {"files": []}, {"more": 1}, {"chunk_bytes": 2**40}],
    ids=str,
)
def test_a_manifest_that_is_none(folder: Path, change: dict[str, object]) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WeightsError, match=MANIFEST):
        Index.read(checked(LocalFiles(folder)))


def test_chunks_grow_with_the_file(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(40 * 1024 * 1024)
    manifest = make_manifest(tmp_path, ["large"])
    assert manifest.chunk_bytes == 64 * 1024
    assert len(manifest.files["large"].sha256) == 640
