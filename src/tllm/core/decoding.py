"""`decoded`: a message from another process, read as the type that was agreed on."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tllm.core.errors import UNREADABLE, FrameError, TllmError

T = TypeVar("T")


def decoded(
    content: bytes,
    decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T],
    what: str = "",
    raises: type[TllmError] = FrameError,
) -> T:
    """What the bytes say. An error for bytes that are not of the decoder's type; `what` says it in words."""
    try:
        return decoder.decode(content)
    except UNREADABLE as error:
        name = getattr(decoder.type, "__name__", str(decoder.type))
        raise raises(f"{what or f'not a {name}'}: {error}", "run the same tllm on every node") from error
