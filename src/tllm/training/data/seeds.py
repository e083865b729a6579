"""Random numbers that depend on what is computed, never on which rank computes it: by name, and by step and row."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

DRAWS = "draws"
"""What the numbers of `draws_of` are called among those of a row's tokens."""


def key_for(*parts: int | str) -> int:
    """A key of 64 bits from a list of numbers and words; equal on every machine and in every version of Python."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_for(seed: int, step: int, row: int) -> int:
    """The seed of one row of one step's global batch, in [0, 2**63), as torch generators take it.

    `row` is the row's place in the global batch (`PackedRow.place`), so that dropout does not depend on the layout.
    """
    return key_for("row", seed, step, row) >> 1


def draws_of(seed: int, step: int, row: int, tokens: int) -> NDArray[np.int64]:
    """A number for each token of a row of a step's global batch, from which what is random there is drawn."""
    return (np.uint64(seed_for(seed, step, row)) + np.arange(tokens, dtype=np.uint64)).view(np.int64)
