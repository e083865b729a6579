"""Dropout of a LoRA update's inputs by a counter-based random generator. What is dropped depends on seed, step, row,
token, linear and column alone, so every plan drops the same, and so does a layer that is recomputed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tllm.training.data.seeds import key_for

AT_ONCE = 2**20
"""Elements whose numbers are drawn at once: each takes 8 bytes meanwhile."""

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def dropped_out(x_TD: Tensor, draws_T: Tensor, module: str, first_column: int, part: float) -> Tensor:
    """x / (1 - part) with about this `part` of its elements 0. `draws_T`: a number of each token's own, int64.

    `module` is the linear, `first_column` that of its inputs which x_TD begins with.
    """
    least, columns = int(part * 2**63), x_TD.shape[1]
    numbers = counted(draws_T.to(x_TD.device), "dropout", first_column, columns, 63, module)
    kept = [number_TD >= least for number_TD in numbers]
    return x_TD * torch.cat(kept).to(x_TD.dtype).mul_(1 / (1 - part))


def counted(draws_T: Tensor, use: str, first: int, columns: int, bits: int, *names: str) -> Iterator[Tensor]:
    """A number in [0, 2**bits) for each token and each of `columns` from `first`, int64; some tokens at a time.

    `use` and `names` say what they are for: others get others.
    """
    columns_D = torch.arange(first, first + columns, device=draws_T.device) * _signed(GOLDEN)
    of_token_T = mixed(draws_T + _signed(key_for(use, *names)))
    for some_T in torch.split(of_token_T, max(1, AT_ONCE // max(1, columns))):
        yield _logical_shift(mixed(some_T[:, None] + columns_D), 64 - bits)


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's function of 64 bits: neighbours become unlike."""
    x = (x ^ _logical_shift(x, 30)) * _signed(FIRST)
    x = (x ^ _logical_shift(x, 27)) * _signed(SECOND)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits as of unsigned numbers, which torch does not have."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
