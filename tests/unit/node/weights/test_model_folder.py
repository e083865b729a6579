from __future__ import annotations

import os
from pathlib import Path

import pytest

from tllm.cluster.weight_messages import READ_BYTES, Bytes, ReadBytes
from tllm.core.errors import WeightsError
from tllm.node.weights.model_folder import ModelFolder, checked_bytes, same_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(os.urandom(100_000))
    (made / "config.json").write_text("{}")
    (made / "private.txt").write_text("secret")
    return made


def test_only_weight_files_are_shared(folder: Path) -> None:
    shared = ModelFolder(folder)
    assert [file.name for file in shared.files] == ["model.safetensors"]
    (folder.parent / "outside.safetensors").write_bytes(b"x" * 10)
    for name in ("private.txt", "config.json", "../outside.safetensors", "/etc/passwd", ""):
        with pytest.raises(WeightsError, match="not a weight file"):
            shared.read(ReadBytes(name, 0, 1))


def test_what_is_read_is_checked_at_the_other_end(folder: Path) -> None:
    wanted = ReadBytes("model.safetensors", 10, 90_000)
    came = ModelFolder(folder).read(wanted)
    assert checked_bytes(wanted, came) == (folder / "model.safetensors").read_bytes()[10:90_000]
    for spoilt in (came.data[:-1], came.data[:-1] + bytes([came.data[-1] ^ 1])):
        with pytest.raises(WeightsError, match="did not come through whole"):
            checked_bytes(wanted, Bytes(spoilt, came.digest))


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, 100_001), (0, 2**62), (2**62, 2**62 + 1)])
def test_bytes_that_are_not_there_are_refused(start: int, stop: int, folder: Path) -> None:
    with pytest.raises(WeightsError, match="it has 100000"):
        ModelFolder(folder).read(ReadBytes("model.safetensors", start, stop))


def test_no_more_is_given_at_once_than_agreed(folder: Path) -> None:
    with (folder / "big.safetensors").open("wb") as file:
        file.truncate(READ_BYTES + 1)
    with pytest.raises(WeightsError, match="at most"):
        ModelFolder(folder).read(ReadBytes("big.safetensors", 0, READ_BYTES + 1))


def test_a_folder_holds_the_model_only_if_its_bytes_are_the_same(folder: Path, tmp_path: Path) -> None:
    files = ModelFolder(folder).files
    assert same_model(folder, files)
    assert not same_model(tmp_path / "nowhere", files)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for place in (0, 50_000, 99_999):
        spoilt = bytearray(content)
        spoilt[place] ^= 1
        weights.write_bytes(spoilt)
        assert not same_model(folder, files), f"a bit at byte {place} of a small file is seen"
    weights.write_bytes(content)
    assert same_model(folder, files)
