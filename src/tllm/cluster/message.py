"""`Message`: the base of every message of the control wire."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all; the tag is the class's name."""
