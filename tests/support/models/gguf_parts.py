"""What llama.cpp's converter makes of families that have something of their own, written from its own formulas.

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


def of_latents(key: str, value: torch.Tensor, config: Any, whole: bool) -> Iterator[Part]:
    """`kv_b_proj`, in two or `whole`."""
    layer, width = key.split(".")[2], config.qk_nope_head_dim
    if whole:
        yield f"blk.{layer}.attn_kv_b.weight", value, np.ascontiguousarray
        return
    heads = value.reshape(config.num_attention_heads, -1, value.shape[-1])
    yield f"blk.{layer}.attn_k_b.weight", heads[:, :width], turned
    yield f"blk.{layer}.attn_v_b.weight", heads[:, width:], np.ascontiguousarray


def describe_grouped(writer: gguf.GGUFWriter, config: Any, whole: bool) -> None:
    """The keys of glm4moe, and those of deepseek2, which are other ones in old files (`whole`)."""
    gating = gguf.ExpertGatingFuncType.SIGMOID if config.model_type != "deepseek_v2" else None
    if gating is not None:
        writer.add_expert_gating_func(gating)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(mlp_kinds(config).index("sparse"))
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.model_type == "glm4_moe":
        return
    query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_head_count_kv(config.num_attention_heads if whole else 1)
    writer.add_key_length(query_dim if whole else config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim if whole else config.kv_lora_rank)
    if not whole:
        writer.add_key_length_mla(query_dim)
        writer.add_value_length_mla(config.v_head_dim)
    if config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def describe_dense(writer: gguf.GGUFWriter, config: Any) -> None:
    """Keys of single families, beside what all have."""
    match config.model_type:
        case "olmo3" | "exaone4":
            writer.add_sliding_window(config.sliding_window)
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        case "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        case "ministral3":
            writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
            writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
        case "minimax_m2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_feed_forward_length(config.intermediate_size)
            writer.add_rope_dimension_count(config.rotary_dim)
        case "qwen3_vl_text":
            writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])


def mlp_kinds(config: Any) -> list[str]:
    kinds: list[str] | None = getattr(config, "mlp_layer_types", None)
    dense = getattr(config, "first_k_dense_replace", 0)
    return kinds or ["dense" if layer < dense else "sparse" for layer in range(config.num_hidden_layers)]
