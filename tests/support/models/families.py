"""Small random models of every family, saved by `transformers` itself: the reference that ours is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE = dict(
    vocab_size=101,  # divides by nothing
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,  # unlike hidden / heads
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
BY_TYPE = dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4))
MINISTRAL = dict(YARN, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)
MLA = dict(kv_lora_rank=20, head_dim=4, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=10)
GROUPED = dict(
    n_routed_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    n_shared_experts=1,
    n_group=3,
    topk_group=2,
    routed_scaling_factor=1.4,
)
DELTA = dict(
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=14,
    linear_value_head_dim=10,
    linear_conv_kernel_dim=3,
    rms_norm_eps=3e-2,  # or what random states say next to nothing of would be made large, with its rounding
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True)
GEMMA4 = dict(
    num_key_value_heads=4,
    head_dim=8,
    global_head_dim=12,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    sliding_window=12,
    layer_types=["sliding_attention", "full_attention"] * 2,
    final_logit_softcapping=4.0,
    rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
        full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e4),
    ),
)

MULTIMODAL: dict[str, dict[str, Any]] = {
    "Gemma3": dict(model_type="siglip_vision_model", num_attention_heads=2, num_hidden_layers=1, image_size=28),
    "Gemma4": dict(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, head_dim=8),
    "Mistral3": dict(model_type="pixtral", num_attention_heads=2, num_hidden_layers=1, head_dim=8),
    "Qwen3VL": dict(depth=1, num_heads=2, out_hidden_size=48, deepstack_visual_indexes=[0]),
    "Qwen3_5": dict(depth=1, num_heads=2, out_hidden_size=48),
}
"""Prefixes whose models also see, and their smallest `vision_config`; theirs is the `text_config`."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_mha_tied_bias": (
        "Llama",
        dict(num_key_value_heads=8, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama_mqa": ("Llama", dict(num_key_value_heads=1)),
    "llama_linear": ("Llama", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama_dynamic": ("Llama", dict(rope_scaling=dict(rope_type="dynamic", factor=4.0), max_position_embeddings=32)),
    "llama_yarn": (
        "Llama",
        dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    ),
    "llama3": ("Llama", dict(rope_scaling=LLAMA3, rope_theta=500000.0)),
    "mistral": ("Mistral", dict(sliding_window=12)),
    "qwen2": ("Qwen2", {}),
    "qwen2_sliding": ("Qwen2", dict(use_sliding_window=True, sliding_window=10, max_window_layers=2)),
    "qwen3": ("Qwen3", {}),
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2Moe", dict(MOE, shared_expert_intermediate_size=28)),
    "qwen3_moe": ("Qwen3Moe", dict(MOE, decoder_sparse_step=2, norm_topk_prob=True)),
    "qwen3_next_moe": ("Qwen3Next", dict(MOE, **DELTA, shared_expert_intermediate_size=28, mlp_only_layers=[1])),
    "qwen3_5": ("Qwen3_5Text", dict(DELTA, rope_parameters=dict(MROPE, partial_rotary_factor=0.5))),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        dict(MOE, **dict(DELTA, linear_num_key_heads=6), shared_expert_intermediate_size=28, attention_bias=True),
    ),
    "qwen3_moe_dense_layer": ("Qwen3Moe", dict(MOE, mlp_only_layers=[1], norm_topk_prob=False)),
    "glm4_moe": (
        "Glm4Moe",
        dict(
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            n_shared_experts=2,
            n_group=3,
            topk_group=2,
            use_qk_norm=True,
            attention_bias=True,
            routed_scaling_factor=1.4,
        ),
    ),
    "glm4_moe_lite": ("Glm4MoeLite", dict(MLA, **GROUPED, num_key_value_heads=8, q_lora_rank=12)),
    "deepseek_v2_moe": (
        "DeepseekV2",
        dict(
            **MLA,
            **GROUPED,
            num_key_value_heads=8,
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            norm_topk_prob=False,
            first_k_dense_replace=1,
        ),
    ),
    "deepseek_v3_moe": (
        "DeepseekV3",
        dict(
            **MLA,
            **GROUPED,
            num_key_value_heads=8,
            q_lora_rank=12,
            attention_bias=True,
            first_k_dense_replace=2,
            rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.8),
        ),
    ),
    "minimax_m2_moe": (
        "MiniMaxM2",
        dict(head_dim=8, num_local_experts=5, num_experts_per_tok=2, intermediate_size=20, rotary_dim=4),
    ),
    "gpt_oss_moe": (
        "GptOss",
        dict(
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=12,
            rope_parameters=dict(YARN, truncate=False),
            swiglu_limit=0.8,
            swiglu_alpha=1.5,
        ),
    ),
    "gemma2": ("Gemma2", dict(sliding_window=12, query_pre_attn_scalar=12)),
    "gemma3": (
        "Gemma3Text",
        dict(sliding_window=12, query_pre_attn_scalar=12, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "gemma4": ("Gemma4Text", dict(GEMMA4, hidden_size_per_layer_input=0)),
    "gemma4_moe": (
        "Gemma4Text",
        dict(
            GEMMA4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=20,
            rms_norm_eps=3e-2,  # or small values would be made large by the router's norm, with their rounding
        ),
    ),
    "gemma4_unified": ("Gemma4UnifiedText", dict(GEMMA4, attention_k_eq_v=False, num_global_key_value_heads=None)),
    "phi3": ("Phi3", dict(head_dim=6, partial_rotary_factor=1.0)),
    "olmo2": ("Olmo2", dict(head_dim=6)),
    "olmo3": ("Olmo3", dict(head_dim=6, sliding_window=12, rope_parameters=BY_TYPE)),
    "exaone4": ("Exaone4", dict(head_dim=6, sliding_window=12, sliding_window_pattern=2)),
    "granite": (
        "Granite",
        dict(
            head_dim=6, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=1.5
        ),
    ),
    "seed_oss": ("SeedOss", dict(attention_bias=True, attention_out_bias=False)),
    "arcee": ("Arcee", dict(head_dim=6, mlp_bias=True)),
    "ernie4_5": ("Ernie4_5", dict(use_bias=True, tie_word_embeddings=False)),
    "glm4": ("Glm4", dict(eos_token_id=[])),
    "ministral3": ("Ministral3", dict(rope_parameters=MINISTRAL)),
    "qwen3_vl": ("Qwen3VL", dict(rope_parameters=MROPE)),
    "smollm3": ("SmolLM3", dict(head_dim=6, no_rope_layer_interval=2)),
    "gemma4_e2b": (
        "Gemma4Text",
        dict(
            GEMMA4,
            attention_k_eq_v=False,
            num_global_key_value_heads=None,
            vocab_size_per_layer_input=101,
            hidden_size_per_layer_input=6,
            rms_norm_eps=3e-2,  # or what small rows of the embedding give would be made large, with its rounding
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
        ),
    ),
}
"""Our name of the case -> transformers' prefix of the classes and what differs from SHAPE."""

SERVED_ONLY = ("gemma4_e2b",)
TRAINABLE = tuple(case for case in FAMILIES if case not in SERVED_ONLY)
"""Those that are trained too."""

UNLIKE = (
    *("llama", "llama_mha_tied_bias", "qwen2_sliding", "gemma2", "gemma4_moe", "gemma4_unified", "olmo2", "granite"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss_moe", "deepseek_v3_moe", "qwen3_next_moe"),
)
"""Each has a part or a way to order them that no other here has. What cuts do to a family is shown by these; all others
are made of the same parts, and are compared with `transformers` whole."""


def save_model(case: str, folder: Path, seed: int = 0, **more: Any) -> transformers.PreTrainedModel:
    """Make the case's random model, save it under `folder`, and return it in evaluation mode (float32)."""
    prefix, own = FAMILIES[case]
    return random_model(prefix, folder, seed, **{**own, **more})


def random_model(prefix: str, folder: Path, seed: int = 0, **own: Any) -> transformers.PreTrainedModel:
    """The same by transformers' prefix of the classes."""
    shape = {**SHAPE, **own}
    sees = prefix in MULTIMODAL
    if sees:
        vision = dict(hidden_size=16, intermediate_size=24, patch_size=14, **MULTIMODAL[prefix])
        shape = dict(text_config=shape, vision_config=vision, tie_word_embeddings=prefix.startswith("Gemma"))
    config = getattr(transformers, f"{prefix}Config")(**shape)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    causal = prefix if sees else prefix.removesuffix("Text")
    model = getattr(transformers, f"{causal}For{'ConditionalGeneration' if sees else 'CausalLM'}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide weights, so that logits are far from flat and a wrong sum or shift cannot hide.
            if parameter.ndim > 1:
                # A table that also makes logits is drawn as a linear, or they would be large and coarsely rounded.
                table_only = "embed_tokens" in name and not model.config.tie_word_embeddings
                divides_itself = name.endswith("router.proj.weight") and prefix.startswith("Gemma4")
                parameter.normal_(0, 1.2 / (1 if table_only or divides_itself else parameter.shape[-1] ** 0.5))
            elif name.endswith("A_log"):
                parameter.normal_(-1.5, 0.5)  # states that last: one that is lost is seen for many tokens
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if prefix.startswith("Gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(len(parameter) ** -0.25)  # scores have no scale beside these norms
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.15)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4)
    model.save_pretrained(folder)
    return model
