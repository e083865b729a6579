"""What llama.cpp's converter makes of models with experts or attention over latents, written from its own formulas.

gpt-oss: gates and ups of all experts in stacks of their own, [experts, outputs, inputs]. deepseek2: `kv_b_proj` in two,
keys turned; or as older files have it, in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Part = tuple[str, torch.Tensor, Callable[[Array], Array]]
"""(name in the file, view of the model's parameter, how the converter changes it)"""


def turned(x: Array) -> Array:
    return np.ascontiguousarray(x.swapaxes(-1, -2))


def of_gpt_oss(key: str, value: torch.Tensor) -> Iterator[Part]:
    """The parts of a layer that other models do not have."""
    layer, part = key.split(".")[2], key.split(".")[-1]
    if part == "sinks":
        yield f"blk.{layer}.attn_sinks.weight", value, np.ascontiguousarray
        return
    end, change = ("bias", np.ascontiguousarray) if part.endswith("_bias") else ("weight", turned)
    if part.startswith("down_proj"):
        yield f"blk.{layer}.ffn_down_exps.{end}", value, change
        return
    for first, half in enumerate(("gate", "up")):
        yield f"blk.{layer}.ffn_{half}_exps.{end}", value[..., first::2], change


def is_of_gpt_oss(key: str) -> bool:
    return key.endswith(".sinks") or ".mlp.experts." in key


def describe_gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
