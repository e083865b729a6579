"""Rotary position embedding (2104.09864) and its forms for long contexts; frequencies in float32 as in training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tllm.spec.model_spec import RopeSpec

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of each token, [T, 1, dim]."""


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
        case "factors":
            return plain / torch.tensor(rope.factors, dtype=torch.float32)
        case "longrope":
            return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32) * rope.theta**powers)
        case _:
            return plain


def rotation(rope: RopeSpec, positions_T: Tensor, dtype: torch.dtype, lengths_T: Tensor | None = None) -> Rotation:
    """The cosines and sines that rotate the heads of tokens at these positions.

    `lengths_T` is read by dynamic rope only (see `_dynamic`).
    """
    if rope.kind == "dynamic" and lengths_T is not None:
        angles = positions_T[:, None].float() * _dynamic(rope, lengths_T)
    else:
        angles = positions_T[:, None].float() * frequencies(rope).to(positions_T.device)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    cos_TH = torch.cat((cos, cos), dim=-1).to(dtype)
    sin_TH = torch.cat((-sin, sin), dim=-1).to(dtype)
    return cos_TH.unsqueeze(1), sin_TH.unsqueeze(1)


def rotate(x_TNH: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn each head's halves (x1, x2) into (x1 cos - x2 sin, x2 cos + x1 sin); widths past the rotary dim stay."""
    if rotation is None:
        return x_TNH
    cos, sin = rotation
    dim = cos.shape[-1]
    x = x_TNH if dim == x_TNH.shape[-1] else x_TNH[..., :dim]
    rotated = torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)
    return rotated if dim == x_TNH.shape[-1] else torch.cat((rotated, x_TNH[..., dim:]), dim=-1)


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
