"""Random numbers that depend on what is computed and never on where: keys from names, seeds from (step, row)."""

from __future__ import annotations

import hashlib


def key_for(*parts: int | str) -> int:
    """A key of 64 bits from a list of numbers and words; equal on every machine and in every version of Python."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_for(seed: int, step: int, row: int) -> int:
    """The seed of one row of one step's global batch, in [0, 2**63), as torch generators take it.

    `row` is the row's place in the global batch (`PackedRow.place`), so that dropout does not depend on the layout.
    """
    return key_for("row", seed, step, row) >> 1
