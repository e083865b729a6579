"""What msgspec raises for bytes that are not what was agreed: its own errors, and two that it lets through."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""`except UNREADABLE` around every decoding of bytes from a network or a file."""
