"""`Message`: what all messages of the control wire are: frozen structs whose tag is their class's name."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. A question has the names of those that may be its `answers`."""

    answers: ClassVar[tuple[str, ...]] = ()
