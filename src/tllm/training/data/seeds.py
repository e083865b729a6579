"""Random numbers that depend on what is computed, never on which rank computes it: by name, and by step and row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tllm.kernels.splitmix64 import GOLDEN_GAMMA, shift_right, signed, splitmix64

DRAWS = "draws"
"""What the numbers of `draws_of` are called among those of a row's tokens."""

AT_ONCE = 2**20
"""Elements whose numbers are drawn at once: each takes 8 bytes meanwhile."""


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


def counter_random(draws_T: Tensor, use: str, first: int, columns: int, bits: int, *names: str) -> Iterator[Tensor]:
    """A number in [0, 2**bits) for each token and each of `columns` from `first`, int64; some tokens at a time.

    They come from a counter-based generator, SplitMix64 over `draws_of`, the column and what they are for (`use` and
    `names`) alone, so a layer that is recomputed has them again.
    """
    columns_D = torch.arange(first, first + columns, device=draws_T.device) * GOLDEN_GAMMA
    of_token_T = splitmix64(draws_T + signed(key_for(use, *names)))
    for some_T in torch.split(of_token_T, max(1, AT_ONCE // max(1, columns))):
        yield shift_right(splitmix64(some_T[:, None] + columns_D), 64 - bits)
