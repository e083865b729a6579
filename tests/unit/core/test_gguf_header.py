"""GGUF headers: what is there is read as gguf's own reader has it, and whatever is wrong is one clear error."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tllm.core.errors import WeightsError
from tllm.core.gguf_files import gguf_files, open_gguf
from tllm.core.gguf_header import STEP, GgufArray, GgufHeader, read_gguf_header
from tllm.core.model_folders import model_name

MOST_BYTES = 2 * STEP
"""That reading may take beside the file's own bytes."""


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    pairs: list[bytes],
    tensors: list[bytes],
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def read(data: bytes) -> GgufHeader:
    return read_gguf_header("model.gguf", len(data), lambda start, stop: data[start:stop])


ARCHITECTURE = pair("general.architecture", 8, text("llama"))
WORDS = pair("words", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("Ω"))
GOOD = file_of(
    [
        ARCHITECTURE,
        WORDS,
        pair("flags", 9, struct.pack("<IQ", 7, 2) + b"\1\0"),
        pair("eps", 6, struct.pack("<f", 1e-5)),
    ],
    [tensor("w", (32, 3), 2, 0), tensor("v", (5,), 0, 64)],
    data=64 + 20,
)


def test_a_good_file() -> None:
    header = read(GOOD)
    words = header.metadata["words"]
    assert isinstance(words, GgufArray)
    assert words.values() == ["a", "", "Ω"]
    flags = header.metadata["flags"]
    assert isinstance(flags, GgufArray)
    assert flags.values() == [True, False]
    assert header.metadata["general.architecture"] == "llama"
    w, v = header.tensors["w"], header.tensors["v"]
    assert (w.shape, w.type.name, w.stop - w.start) == ((3, 32), "Q4_0", 54)
    assert (v.shape, v.type.name, v.stop) == ((5,), "F32", len(GOOD))


def write(path: Path, split: int = 0, count: int = 3) -> gguf.GGUFWriter:
    """With gguf's own writer: every type of value, and tensors of several types."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -3)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -300)
    writer.add_uint32("t.u32", 2**32 - 1)
    writer.add_int32("t.i32", -(2**31))
    writer.add_float32("t.f32", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "Grüße")
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float64("t.f64", 0.1)
    writer.add_array("t.texts", ["a", "bc", ""])
    writer.add_array("t.numbers", [1, -2, 3])
    writer.add_array("t.floats", [0.5, 1.5])
    for i in range(count):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.arange(5 + i, dtype=np.float32))
        raw = np.zeros((2, 3, 34), dtype=np.uint8)
        writer.add_tensor(f"blk.{i}.ffn_up_exps.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer


def test_what_is_read_is_what_gguf_reads(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    found = open_gguf(tmp_path / "m.gguf")
    assert found is not None
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    for name, field in theirs.fields.items():
        if name.startswith("GGUF."):
            continue
        value = found.metadata[name]
        assert (value.values() if isinstance(value, GgufArray) else value) == field.contents(), name
    assert len(found.metadata) == len([name for name in theirs.fields if not name.startswith("GGUF.")])
    assert len(theirs.tensors) == len(found.header.tensors)
    for one in theirs.tensors:
        ours = found.header.tensors[one.name]
        assert ours.shape == tuple(int(x) for x in reversed(one.shape))
        assert (ours.start, ours.stop) == (one.data_offset, one.data_offset + one.n_bytes)
        assert ours.type.name == one.tensor_type.name
    assert found.floats("blk.1.attn_norm.weight") == (0, 1, 2, 3, 4, 5)


DAMAGE: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + GOOD[4:], "does not begin with GGUF"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "is a pointer of Git LFS"),
    "empty": (b"", "goes on to byte 4 at least and the file has 0"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + GOOD[8:], "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + GOOD[8:], "big-endian"),
    "many pairs": (file_of([], [], counts=(0, 2**62)), "key-value pairs"),
    "many tensors": (file_of([], [], counts=(2**62, 0)), "tensors"),
    "long key": (file_of([struct.pack("<Q", 2**40) + bytes(99)], []), "a key is said to have 1099511627776 bytes"),
    "long text": (file_of([pair("a", 8, struct.pack("<Q", 2**50))], [], 99), "1125899906842624 bytes"),
    "text past the end": (file_of([pair("a", 8, struct.pack("<Q", 500))], [], 99), "the file has"),
    "long list": (file_of([pair("a", 9, struct.pack("<IQ", 4, 2**40))], [], 99), "1099511627776 numbers"),
    "long list of texts": (file_of([pair("a", 9, struct.pack("<IQ", 8, 2**61))], [], 99), "texts in a"),
    "text in a list": (file_of([pair("a", 9, struct.pack("<IQQ", 8, 1, 2**60))], [], 99), "the file has"),
    "list of lists": (file_of([pair("a", 9, struct.pack("<IQ", 9, 1))], [], 99), "list of type 9"),
    "type of value": (file_of([pair("a", 13, bytes(8))], []), "type 13"),
    "truth": (file_of([pair("a", 7, b"\2")], []), "neither true nor false"),
    "no UTF-8": (file_of([pair("a", 8, struct.pack("<Q", 1) + b"\xff")], []), "no UTF-8"),
    "key twice": (file_of([ARCHITECTURE, ARCHITECTURE], []), "gives 'general.architecture' twice"),
    "tensor twice": (file_of([], [tensor("w", (8,), 0, 0), tensor("w", (8,), 0, 32)], 64), "two tensors 'w'"),
    "type of tensor": (file_of([], [tensor("w", (8,), 99, 0)], 64), "type 99"),
    "dims": (file_of([], [text("w") + struct.pack("<I", 2**31) + bytes(99)], 64), "has 2147483648 dims"),
    "no dims": (file_of([], [text("w") + struct.pack("<IIQ", 0, 0, 0)], 64), "has 0 dims"),
    "width of 0": (file_of([], [tensor("w", (0, 4), 0, 0)], 64), "no tensor can have"),
    "overflow": (file_of([], [tensor("w", (2**40, 2**40), 0, 0)], 64), "no tensor can have"),
    "half a block": (file_of([], [tensor("w", (33,), 2, 0)], 64), "no whole number of blocks of Q4_0"),
    "past the end": (file_of([], [tensor("w", (2**30,), 0, 0)], 64), "and the file has"),
    "cut short": (GOOD[:-1], "ends at byte"),
    "overlap": (file_of([], [tensor("w", (8,), 0, 0), tensor("v", (8,), 0, 0)], 64), "makes that 32"),
    "hole": (file_of([], [tensor("w", (8,), 0, 0), tensor("v", (8,), 0, 64)], 128), "makes that 32"),
    "unaligned": (file_of([], [tensor("w", (8,), 0, 4)], 128), "said to begin at 4"),
    "alignment": (file_of([pair("general.alignment", 4, struct.pack("<I", 0))], []), "should be a power of two"),
    "alignment text": (file_of([pair("general.alignment", 8, text("x"))], []), "should be a power of two"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_clear_error(case: str) -> None:
    data, why = DAMAGE[case]
    with pytest.raises(WeightsError, match=why) as caught:
        read(data)
    assert "model.gguf" in caught.value.message


def test_texts_of_a_list_are_checked_when_they_are_asked_for() -> None:
    header = read(file_of([pair("a", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")], []))
    words = header.metadata["a"]
    assert isinstance(words, GgufArray)
    with pytest.raises(WeightsError, match="a is no UTF-8"):
        words.values()


def taken(check: Callable[[], object]) -> int:
    """Bytes that a call takes at its peak; a WeightsError is fine."""
    tracemalloc.start()
    try:
        with contextlib.suppress(WeightsError):
            check()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def decode(data: bytes) -> None:
    header = read(data)
    for value in header.metadata.values():
        if isinstance(value, GgufArray):
            value.values()


@settings(max_examples=examples(300))
@given(data=st.data())
def test_any_bytes(data: st.DataObject) -> None:
    cut = st.integers(0, len(GOOD)).map(lambda at: GOOD[:at])
    drawn = data.draw(
        st.one_of(st.binary(max_size=200).map(b"GGUF".__add__), st.builds(bytes.__add__, cut, st.binary()))
    )
    assert taken(lambda: decode(drawn)) < MOST_BYTES


def test_changed_bytes() -> None:
    """One to three bytes of a good file, or an eight-byte number of it, are others: an answer or an error, in memory
    of the file's size."""
    dice = random.Random(3)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(GOOD)
        if dice.random() < 0.4:
            at = dice.randrange(len(damaged) - 8)
            damaged[at : at + 8] = struct.pack(
                "<Q", dice.choice([2**64 - 1, 2**63, 2**40, 2**31, 1000, dice.randrange(99)])
            )
        else:
            for _ in range(dice.randint(1, 3)):
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            decode(bytes(damaged))
        except WeightsError:
            refused += 1
    assert refused > 500


def test_a_lie_takes_no_memory() -> None:
    for data, _ in DAMAGE.values():
        assert taken(lambda data=data: decode(data)) < MOST_BYTES


def test_pieces_are_read_together(tmp_path: Path) -> None:
    writer = write(tmp_path / "m.gguf", split=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for given_path in (tmp_path, tmp_path / names[0], tmp_path / names[2]):
        found = open_gguf(given_path)
        assert found is not None
        assert found.metadata["t.u8"] == 200
        assert {t.file for t in found.header.tensors.values()} == set(names)
        assert len(found.header.tensors) == 6
    assert len(writer.tensors) == 3


def test_pieces_that_do_not_belong_together(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", split=2)
    first, second, third = sorted(tmp_path.iterdir())
    saved = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(WeightsError, match="says that it is piece 2"):
        open_gguf(tmp_path)
    second.unlink()
    with pytest.raises(WeightsError, match=r"m-00002-of-00003\.gguf is missing"):
        open_gguf(first)
    second.write_bytes(saved)
    alone = tmp_path / "other" / "alone.gguf"
    alone.parent.mkdir()
    alone.write_bytes(first.read_bytes())
    with pytest.raises(WeightsError, match="is in 3 files and 1") as caught:
        open_gguf(alone)
    assert "NAME-00001-of-0000N.gguf" in caught.value.hint


def test_which_files_are_the_model() -> None:
    assert gguf_files(["a.gguf", "config.json", "mmproj-a.gguf"]) == ["a.gguf"]
    assert gguf_files(["a.gguf", "model.safetensors"]) == []
    assert gguf_files(["config.json"]) == []
    assert gguf_files(["a.gguf", "b.gguf", "model.safetensors"], "b.gguf") == ["b.gguf"]
    assert gguf_files(["a-00000-of-00000.gguf"]) == ["a-00000-of-00000.gguf"]
    with pytest.raises(WeightsError, match=r"several GGUF files: a\.gguf, b\.gguf"):
        gguf_files(["b.gguf", "a.gguf"])
    with pytest.raises(WeightsError, match=r"several GGUF files: a\.gguf, b\.gguf, c\.gguf and 2 others"):
        gguf_files([f"{name}.gguf" for name in "edcba"])
    with pytest.raises(WeightsError, match=r"c\.gguf is missing"):
        gguf_files(["b.gguf"], "c.gguf")


def test_a_file_is_called_by_its_own_name(tmp_path: Path) -> None:
    blob = tmp_path / "0123abcd"
    blob.write_bytes(GOOD)
    (tmp_path / "tiny.gguf").symlink_to(blob)
    assert model_name(tmp_path / "tiny.gguf") == "tiny"
    assert open_gguf(tmp_path / "tiny.gguf") is not None
    assert model_name(tmp_path / "sub" / "..") == tmp_path.name


def test_no_model_at_a_path(tmp_path: Path) -> None:
    assert open_gguf(tmp_path) is None
    assert open_gguf(tmp_path / "config.json") is None
    with pytest.raises(WeightsError, match=r"x\.gguf is missing"):
        open_gguf(tmp_path / "x.gguf")
