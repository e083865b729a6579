"""`Message`: what all messages of the control wire are: frozen structs whose tag is their class's name."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""
