"""Rotary position embedding (2104.09864) and its forms for long contexts; frequencies in float32 as in training."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.kernels.rows.row_operations import row_operations
from tllm.kernels.rows.torch_steps import rotated_in_steps
from tllm.spec.model_spec import RopeSpec


class Rotation(NamedTuple):
    """How the heads of some tokens are turned."""

    cos: Tensor
    """[T, 1, dim]."""
    sin: Tensor
    """[T, 1, dim], negative where it meets the second of a pair."""
    interleaved: bool
    """Whether neighbouring widths are a pair."""
    query_scale: Tensor | None
    """[T, 1, 1], what queries are multiplied by besides."""


def frequencies(rope: RopeSpec) -> Tensor:
    """Radians per position of each pair of widths, [dim / 2]."""
    powers = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**powers)
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(powers, rope)
        case "proportional":
            return torch.where(powers < rope.turned / rope.dim, plain, 0.0) / rope.factor
        case "factors":
            return plain / torch.tensor(rope.factors, dtype=torch.float32)
        case "longrope":
            return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32) * rope.theta**powers)
        case _:
            return plain


@functools.cache
@torch.inference_mode(False)
def _frequencies_on(rope: RopeSpec, device: torch.device) -> Tensor:
    """The same on a device, to which they are copied once."""
    return frequencies(rope).to(device)


def rotation(rope: RopeSpec, positions_T: Tensor, dtype: torch.dtype, lengths_T: Tensor | None = None) -> Rotation:
    """The cosines and sines that rotate the heads of tokens at these positions.

    `lengths_T` is read by dynamic rope only (see `_dynamic`).
    """
    if rope.kind == "dynamic" and lengths_T is not None:
        angles = positions_T[:, None].float() * _dynamic(rope, lengths_T)
    else:
        angles = positions_T[:, None].float() * _frequencies_on(rope, positions_T.device)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    if rope.interleaved:
        cos_TH, sin_TH = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(1)
    else:
        cos_TH, sin_TH = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    query_scale = _query_scale(rope, positions_T).to(dtype) if rope.query_scale_beta else None
    return Rotation(cos_TH.to(dtype).unsqueeze(1), sin_TH.to(dtype).unsqueeze(1), rope.interleaved, query_scale)


def rotations(
    ropes: Iterable[RopeSpec], positions_T: Tensor, dtype: torch.dtype, lengths_T: Tensor | None = None
) -> dict[RopeSpec | None, Rotation | None]:
    """`rotation` by each of the ropes, and none for layers that have none."""
    none: dict[RopeSpec | None, Rotation | None] = {None: None}
    return none | {rope: rotation(rope, positions_T, dtype, lengths_T) for rope in ropes}


def rotate_both(q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """`rotate_queries` and `rotate` of the queries and keys of the same tokens, at once where that is quicker."""
    if rotation is None or rotation.interleaved or rotation.query_scale is not None:
        return rotate_queries(q_TNH, rotation), rotate(k_TKH, rotation)
    fused = row_operations(q_TNH)
    if fused is None:
        return rotate(q_TNH, rotation), rotate(k_TKH, rotation)
    return fused.rotate_both(q_TNH, k_TKH, rotation.cos, rotation.sin)


def rotate(x_TNH: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn each head's halves, or neighbours, (x1, x2) into (x1 cos - x2 sin, x2 cos + x1 sin).

    Widths past the rotary dim stay. Without gradients it may happen in x's own memory.
    """
    if rotation is None:
        return x_TNH
    cos, sin = rotation.cos, rotation.sin
    if not rotation.interleaved:
        fused = row_operations(x_TNH)
        return rotated_in_steps(x_TNH, cos, sin) if fused is None else fused.rotate_in_place(x_TNH, cos, sin)
    dim = cos.shape[-1]
    x = x_TNH if dim == x_TNH.shape[-1] else x_TNH[..., :dim]
    neighbours = x.reshape(*x.shape[:-1], dim // 2, 2).flip(-1).flatten(-2)
    rotated = torch.addcmul(x * cos, neighbours, sin)
    return rotated if dim == x_TNH.shape[-1] else torch.cat((rotated, x_TNH[..., dim:]), dim=-1)


def rotate_queries(q_TNH: Tensor, rotation: Rotation | None) -> Tensor:
    """The same of queries, which some models then scale by their position."""
    q_TNH = rotate(q_TNH, rotation)
    return q_TNH if rotation is None or rotation.query_scale is None else q_TNH * rotation.query_scale


def _query_scale(rope: RopeSpec, positions_T: Tensor) -> Tensor:
    """Larger queries the farther a text goes on, [T, 1, 1]: sharper attention over more keys (Llama 4)."""
    return (1 + rope.query_scale_beta * torch.log1p(positions_T.float().div(rope.original).floor()))[:, None, None]


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    low, high = rope.original / rope.low_freq_factor, rope.original / rope.high_freq_factor
    blend = (rope.original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > low, plain / rope.factor, plain)
    return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)


def _yarn(powers: Tensor, rope: RopeSpec) -> Tensor:
    """YaRN (2309.00071), section 3.2: interpolate slow pairs, keep fast ones, ramp between."""

    def pair_that_turns(times: float) -> float:
        return (rope.dim * math.log(rope.original / (times * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = rope.theta**powers
    unscaled = 1 - ramp
    return (1.0 / (rope.factor * periods)) * (1 - unscaled) + (1.0 / periods) * unscaled


def _dynamic(rope: RopeSpec, lengths_T: Tensor) -> Tensor:
    """NTK scaling, [T, dim / 2]: each token's base grows with its sequence's length when it was computed.

    That is the prompt's length for a prompt token and position + 1 for a later one, at least the trained context.
    Worked out in float64, as float32 powers are rounded otherwise at the end of a tensor than inside it: the angles of
    a token would depend on how many others there are.
    """
    grown = rope.factor * lengths_T.clamp(min=rope.original).double() / rope.original - (rope.factor - 1)
    base = rope.theta * grown ** (rope.dim / (rope.dim - 2))
    powers = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    return (1.0 / base[:, None] ** powers.double().to(lengths_T.device)).float()
