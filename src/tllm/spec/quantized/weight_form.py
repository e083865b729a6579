"""How a served model's weights are to be held in memory, where that is not as its files keep them. No torch.

The wish travels with the model's `config.json`, so that every rank of a cluster follows the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tllm.core.errors import ConfigError
from tllm.spec.quantized.weight_bits import EMBEDDING, HEAD

Quantize = Literal["int8", "int4"]

QUANTIZE, DEQUANTIZE = "_quantize", "_dequantize"
"""The keys that stand for these wishes in a config; no checkpoint's file has them."""

LINEAR = re.compile(
    r"\.((q|k|v|o|qkv|gate|up|down|gate_up|out)_proj|in_proj_(qkvz|qkv|z)|experts\.\d+\.w[123])\.weight$"
)
"""Names of the weights that `--quantize` rounds, beside the table of the logits. Routers stay as they are, and
so do the few rows that make alpha and beta of gated delta nets (`in_proj_a`, `in_proj_b`)."""

STACK = re.compile(r"\.experts\.(gate_up|down)_proj$")
"""Names of tensors of all experts of a layer, [experts, inputs, outputs], which are rounded too (gpt_oss)."""


def with_weight_form(config: dict[str, Any], quantize: Quantize | None, dequantize: bool = False) -> dict[str, Any]:
    """The config of a model whose weights are rounded while they are loaded, or made plain numbers, as asked.

    ConfigError for bits that plain weights are not rounded to.
    """
    if quantize not in (None, *get_args(Quantize)):
        raise ConfigError(f"quantize is {quantize!r}", f"give one of {', '.join(get_args(Quantize))}")
    wishes = {QUANTIZE: quantize, DEQUANTIZE: dequantize}
    return config | {key: value for key, value in wishes.items() if value}


def keeps_few_bits(config: Mapping[str, Any]) -> bool:
    """Whether weights of few bits stay so in memory."""
    return not config.get(DEQUANTIZE)


def rounded_modules(wish: Quantize, tied: bool) -> tuple[tuple[str, Quantize], ...]:
    """What `--quantize` rounds, and to what: patterns of modules' whole names, of which the first that matches counts.

    The table of the logits, which may be that of the embedding too, is rounded to 8 bits: in 4 it would cost more of
    the model's quality than it saves.
    """
    linears = rf".*{LINEAR.pattern}".removesuffix(r"\.weight$")
    return (EMBEDDING if tied else HEAD, "int8"), (linears, wish)


def rounding_of(name: str, config: Mapping[str, Any], tied: bool) -> Quantize | None:
    """To what a weight is rounded under `--quantize`, by its name; None for one that stays as it is."""
    wish: Quantize | None = config.get(QUANTIZE)
    if wish is None or not (name.endswith(".weight") or STACK.search(name)):
        return None
    module = name.removesuffix(".weight")
    return next((kind for pattern, kind in rounded_modules(wish, tied) if re.fullmatch(pattern, module)), None)


def expert_matrix(stack: str, expert: int) -> str:
    """The name of one expert's matrix [outputs, inputs] of a stack: it is no tensor of the files.

    >>> expert_matrix("model.layers.0.mlp.experts.down_proj", 3)
    'model.layers.0.mlp.experts.3.down_proj.weight'
    """
    module, _, part = stack.rpartition(".")
    return f"{module}.{expert}.{part}.weight"
