"""Messages of other processes: read as the type that was agreed on, or refused as a frame that is none.

And how many there are of something, as a user reads it.
"""

from __future__ import annotations

import msgspec
import pytest

from tllm.core.errors import FrameError, counted, decoded


class Place(msgspec.Struct):
    rank: int


PLACES = msgspec.msgpack.Decoder(Place)


def test_a_message_of_the_type_that_was_agreed_on_is_read() -> None:
    assert decoded(msgspec.msgpack.encode(Place(3)), PLACES) == Place(3)


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", msgspec.msgpack.encode({"rank": "3"}), b"\x91" * 5000, b"\x81\xa4\xff\xff\xff\xff\x03"]
)
def test_whatever_else_comes_is_a_frame_that_is_none(content: bytes) -> None:
    with pytest.raises(FrameError, match=r"^not a Place: ") as refused:
        decoded(content, PLACES)
    assert refused.value.hint == "run the same tllm on every node"
    with pytest.raises(FrameError, match=r"^rank 1 did not say where it is: "):
        decoded(content, PLACES, "rank 1 did not say where it is")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (counted(1, "rank"), "1 rank"),
        (counted(0, "rank"), "0 ranks"),
        (counted(3, "rank"), "3 ranks"),
        (counted(1, "microbatch", "microbatches"), "1 microbatch"),
        (counted(2, "row waits", "rows wait"), "2 rows wait"),
    ],
)
def test_one_is_told_in_the_singular(words: str, said: str) -> None:
    assert words == said
