"""What a library carries: what it has, and what still waits, when it says that the target is gone."""

from __future__ import annotations

import pytest

from tllm.comm.links.transport_link import CHUNK_BYTES, OutgoingFrames
from tllm.core.errors import LinkClosed

GONE = LinkClosed("rank 8 went away")


def posted(*frames: bytes) -> OutgoingFrames:
    one = OutgoingFrames(3, 8, 1.0)
    for frame in frames:
        one.write(frame)
    return one


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_what_the_library_has_whole_is_not_lost_at_the_end(size: int) -> None:
    """The target may have read it and gone before the library comes back for more."""
    one = posted(b"x" * size)
    runs = one.chunks()
    assert sum(len(next(runs)) for _ in range(0, size, CHUNK_BYTES)) == size
    one.mark_lost(GONE)
    one.close()


@pytest.mark.parametrize("frames", [(b"x" * (CHUNK_BYTES + 1),), (b"first", b"second")], ids=["half", "second"])
def test_what_the_library_does_not_have_is_lost(frames: tuple[bytes, ...]) -> None:
    one = posted(*frames)
    next(one.chunks())
    one.mark_lost(GONE)
    with pytest.raises(LinkClosed, match="rank 8 went away"):
        one.close()


def test_nothing_is_written_to_who_is_gone() -> None:
    one = posted()
    one.mark_lost(GONE)
    with pytest.raises(LinkClosed, match="rank 8 went away"):
        one.write(b"late")
    one.close()
