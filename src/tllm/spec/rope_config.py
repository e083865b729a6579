"""The rotary part of a `config.json`: `rope_theta` with `rope_scaling`, or `rope_parameters`, into a `RopeSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.model_spec import RopeKind, RopeSpec

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "factors", "proportional")

KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate", "finetuned",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    "factors": {"factors"},
    "proportional": {"factor"},
}  # fmt: skip
"""Keys that each kind understands, beside `rope_type`, `rope_theta` and `partial_rotary_factor`."""

LISTS = ("short_factor", "long_factor", "factors")
"""Keys that hold lists; all others are numbers or words."""

NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor",),
}
"""Keys without which a kind says nothing."""


def rope_spec(parameters: Mapping[str, Any], theta: float, head_dim: int, max_positions: int) -> RopeSpec:
    """Read one set of rope parameters. `theta` serves where they name none. Unknown kinds and keys are refused."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "su":  # the first name of LongRoPE
        kind = "longrope"
    if kind not in KINDS:
        raise ModelError(f"rope_scaling of type {kind!r} is not known", "known: " + ", ".join(KINDS))
    known = KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    extra = [key for key, value in parameters.items() if key not in known and value is not None]
    if extra:
        raise ModelError(f"rope_scaling of type {kind!r} has a key {extra[0]!r} that is not handled")
    for key, value in parameters.items():
        if isinstance(value, dict | list) and key not in LISTS:
            raise ModelError(f"rope_scaling: {key}={str(value)[:60]} is not a number", "copy config.json again")
    for key in NEEDED.get(kind, ()):
        if not parameters.get(key):
            raise ModelError(f"rope_scaling of type {kind!r} has no {key}", "copy config.json again")
    base, dim = (
        float(parameters.get("rope_theta") or theta),
        head_dim * (parameters.get("partial_rotary_factor") or 1.0),
    )
    odd = (head_dim if kind == "proportional" else int(dim)) % 2
    if base <= 1 or not 2 <= dim <= head_dim or odd:
        raise ModelError(f"a rope of theta {base} over {dim} of {head_dim} widths cannot be", "copy the file again")
    turned = 0
    if kind == "proportional":  # a part of a head's pairs turn, at the rates that they have where all do
        turned, dim = 2 * int(dim // 2), head_dim
    factor = parameters.get("factor")
    original = parameters.get("original_max_position_embeddings") or max_positions
    if factor is None:
        factor = max_positions / original
    return RopeSpec(
        theta=base,
        dim=int(dim),
        kind=kind,
        factor=float(factor),
        original=max_positions if kind == "dynamic" else original,
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_attention_factor(kind, parameters, float(factor), original),
        short_factor=_factors("longrope", kind, parameters.get("short_factor"), int(dim)),
        factors=_factors("factors", kind, parameters.get("factors"), head_dim),
        turned=turned,
    )


def _factors(of: RopeKind, kind: RopeKind, given: Any, dim: int) -> tuple[float, ...]:
    """One above 0 for each pair of the widths that are turned, of the kind that has such a list."""
    factors = tuple(map(float, given)) if kind == of and isinstance(given, list) else ()
    if kind == of and (len(factors) != dim // 2 or not min(factors, default=0.0) > 0):
        raise ModelError(f"rope has {len(factors)} factors, and {dim} widths that are turned need {dim // 2} above 0")
    return factors


def _attention_factor(kind: str, parameters: Mapping[str, Any], factor: float, original: int) -> float:
    """What YaRN (eq. 22) and LongRoPE multiply cos and sin by."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if kind != "yarn":
        return 1.0
    mscale, of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and of_all:
        return yarn_scale(factor, float(mscale)) / yarn_scale(factor, float(of_all))
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """How much YaRN sharpens attention over a context that is stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
