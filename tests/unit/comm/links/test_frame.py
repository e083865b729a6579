"""Frames: what is packed is what is parsed, and no bytes whatever make the parser do more than say no."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tllm.comm.links import frame
from tllm.core.errors import FrameError

SHAPES = st.lists(st.integers(0, 9), max_size=frame.MAX_DIMS).map(tuple)


def sealed(shape: tuple[int, ...], dtype: torch.dtype, epoch: int, sequence: int, payload: bytes = b"") -> bytes:
    return frame.seal(frame.tensor_prefix(shape, dtype, epoch) + frame.pack_sequence(sequence), payload)


@given(SHAPES, st.sampled_from(frame.DTYPES), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_header_reads_back(shape: tuple[int, ...], dtype: torch.dtype, epoch: int, sequence: int) -> None:
    header = frame.parse(sealed(shape, dtype, epoch, sequence))
    assert (header.dtype, header.shape, header.epoch, header.sequence) == (dtype, shape, epoch, sequence)
    assert header.length == torch.empty(shape, dtype=dtype).nbytes


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_header_of_bytes_reads_back(length: int, epoch: int, sequence: int) -> None:
    raw = frame.seal(frame.bytes_prefix(length, epoch) + frame.pack_sequence(sequence), b"")
    header = frame.parse(raw)
    assert (header.dtype, header.shape, header.epoch, header.sequence) == (None, (), epoch, sequence)
    assert header.length == length


@settings(max_examples=examples(500))
@given(st.binary(min_size=frame.HEADER_SIZE, max_size=frame.HEADER_SIZE))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        frame.parse(raw)
    assert frame.describe(raw)


@settings(max_examples=examples(500))
@given(st.binary(min_size=frame.HEADER_SIZE - 4, max_size=frame.HEADER_SIZE - 4))
def test_random_bytes_behind_the_magic_are_a_frame_or_refused(tail: bytes) -> None:
    raw = frame.MAGIC + tail
    try:
        header = frame.parse(raw)
    except FrameError:
        return
    assert header.dtype is None or header.length % header.dtype.itemsize == 0
    assert str(header) == frame.describe(raw)


@settings(max_examples=examples(500))
@given(SHAPES, st.sampled_from(frame.DTYPES), st.binary(max_size=64), st.data())
def test_any_flipped_bit_is_noticed(
    shape: tuple[int, ...], dtype: torch.dtype, payload: bytes, data: st.DataObject
) -> None:
    whole = bytearray(sealed(shape, dtype, 7, 11, payload))
    expected = bytes(whole[: frame.CRC_AT])
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[at // 8] ^= 1 << at % 8
    head_is_as_expected = whole.startswith(expected)
    assert not (head_is_as_expected and frame.is_sealed(whole[: frame.HEADER_SIZE], whole[frame.HEADER_SIZE :]))
    assert not frame.is_sealed(whole[: frame.HEADER_SIZE], whole[frame.HEADER_SIZE :])


@given(st.binary(max_size=frame.HEADER_SIZE - 1))
def test_a_torn_header_is_described(raw: bytes) -> None:
    assert frame.describe(raw)


def test_a_length_that_is_not_that_of_the_shape_is_refused() -> None:
    raw = bytearray(sealed((2, 3), torch.float32, 0, 0))
    raw[12:20] = (25).to_bytes(8, "little")
    with pytest.raises(FrameError, match=r"25 bytes for float32 \(2, 3\)"):
        frame.parse(raw)


def test_another_version_is_refused_by_both_numbers() -> None:
    raw = bytearray(sealed((2,), torch.int8, 0, 0))
    raw[4] = 9
    with pytest.raises(FrameError, match=r"version 9.*speaks 3"):
        frame.parse(raw)


def test_what_no_frame_holds_is_refused_by_the_sender() -> None:
    with pytest.raises(FrameError, match="complex64"):
        frame.tensor_prefix((2,), torch.complex64, 0)
    with pytest.raises(FrameError, match="does not fit"):
        frame.tensor_prefix((1,) * 9, torch.int8, 0)
    with pytest.raises(FrameError, match="does not fit"):
        frame.tensor_prefix((2**32,), torch.int8, 0)


@pytest.mark.parametrize("dtype", frame.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
def test_memory_is_the_tensor_itself(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 2, shape).to(dtype)
    memory = frame.memory_of(x)
    assert len(memory) == x.nbytes
    if x.nbytes:
        memory[0] = b"\x01"
        assert x.reshape(-1)[:1].view(torch.uint8)[0] == 1
