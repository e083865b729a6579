"""The model families: for each `model_type`, how its `config.json` becomes a `ModelSpec`. The only reader of that file.

A family is one function of a `Config`, which hands out keys and remembers them. A key nobody asked for is an error
that names it, since it may change the maths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.config_parts import layer_windows, plain_rope, plain_spec, ropes_by_type, same_layers
from tllm.spec.hf_config import Config
from tllm.spec.model_spec import LayerSpec, ModelSpec, MoeSpec
from tllm.spec.rope_config import rope_spec
from tllm.spec.text_config import MULTIMODAL, text_config

Family = Callable[[Config], ModelSpec]


def spec_from_config(raw: dict[str, Any]) -> ModelSpec:
    """Read a Hugging Face `config.json`. Raises ModelError for an unknown architecture or an unhandled key.

    Of a multimodal model the text part is read.
    """
    raw = text_config(raw)
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        named = raw.get("architectures") or kind
        known = ", ".join(sorted([*FAMILIES, *MULTIMODAL]))
        raise ModelError(f"model_type {kind!r} ({named}) is not known", f"known: {known}")
    config = Config(raw)
    spec = FAMILIES[kind](config)
    config.check_all_read()
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} kv heads evenly")
    return spec


def llama(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    config.ignore("pretraining_tp")
    layers = same_layers(config, rope=plain_rope(config))
    return plain_spec(config, layers, attention_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(config: Config) -> ModelSpec:
    return plain_spec(config, same_layers(config, rope=plain_rope(config), window=config.get("sliding_window", 4096)))


def qwen2(config: Config) -> ModelSpec:
    return plain_spec(config, _qwen_layers(config), attention_bias=True)


def qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return plain_spec(config, _qwen_layers(config), qk_norm="head", attention_bias=bias, output_bias=bias)


def qwen3_vl(config: Config) -> ModelSpec:
    """qwen3 as the text part of Qwen3-VL: on text its three rotary sections have equal positions, so they are one."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = {key: value for key, value in parameters.items() if not key.startswith("mrope_")}
    rope = rope_spec(
        plain, config.get("rope_theta", 5e5), config.head_dim(), config.number("max_position_embeddings", 128000)
    )
    config.ignore("rope_parameters", "rope_scaling")
    bias = config.flag("attention_bias")
    return plain_spec(config, same_layers(config, rope=rope), qk_norm="head", attention_bias=bias, output_bias=bias)


def mixtral(config: Config) -> ModelSpec:
    config.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    moe = MoeSpec(
        num_experts=config.number("num_local_experts", 8),
        top_k=config.number("num_experts_per_tok", 2),
        width=config.number("intermediate_size"),
        style="mixtral",
    )
    rope = plain_rope(config, theta=1e6)
    return plain_spec(config, same_layers(config, rope=rope, window=config.get("sliding_window"), moe=moe))


def qwen2_moe(config: Config) -> ModelSpec:
    shared = config.number("shared_expert_intermediate_size", 5632)
    sliding = config.flag("use_sliding_window")
    window, windowed = config.get("sliding_window", 4096), config.number("max_window_layers", 28)
    count = config.number("num_hidden_layers")
    default = [
        "sliding_attention" if sliding and i % 2 == 0 and i < windowed else "full_attention" for i in range(count)
    ]
    windows = layer_windows(config, default, window if sliding else None)
    return plain_spec(config, _moe_layers(config, windows, shared), attention_bias=config.flag("qkv_bias", True))


def qwen3_moe(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    window = config.get("sliding_window", 4096) if config.flag("use_sliding_window") else None
    config.ignore("max_window_layers", "sliding_window")
    layers = _moe_layers(config, [window] * config.number("num_hidden_layers"), shared=0)
    return plain_spec(config, layers, qk_norm="head", attention_bias=bias, output_bias=bias)


def glm4_moe(config: Config) -> ModelSpec:
    """Experts chosen by sigmoids with a correction, as in DeepSeek-V3 (2412.19437), behind the first, dense layers."""
    config.ignore("output_router_logits", "num_local_experts", "num_nextn_predict_layers", "num_mtp_layers")
    width = config.number("moe_intermediate_size")
    moe = MoeSpec(
        num_experts=config.number("n_routed_experts"),
        top_k=config.number("num_experts_per_tok"),
        width=width,
        shared_width=width * config.number("n_shared_experts", 1),
        shared_gate=False,
        scores="sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        weight_scale=config.positive("routed_scaling_factor", 1.0),
        correction_bias=True,
        groups=config.number("n_group", 1),
        top_groups=config.number("topk_group", 1),
        style="glm",
    )
    _check_groups(moe)
    rope, dense = plain_rope(config, part=0.5), config.number("first_k_dense_replace", 1)
    count = config.number("num_hidden_layers")
    layers = tuple(LayerSpec(rope=rope, moe=moe if i >= dense else None) for i in range(count))
    bias, norm = config.flag("attention_bias"), config.flag("use_qk_norm")
    return plain_spec(config, layers, qk_norm="head" if norm else "none", attention_bias=bias)


def gpt_oss(config: Config) -> ModelSpec:
    """Sinks, windows on every other layer, and experts in stacks with biases and a clamped activation."""
    config.ignore("router_aux_loss_coef", "output_router_logits", "hidden_act", "num_experts")
    config.ignore("experts_per_token", "initial_context_length")  # the same numbers under older names
    config.number("head_dim")
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise ModelError("config.json has no rope_scaling", "every model of this family gives it")
    moe = MoeSpec(
        num_experts=config.number("num_local_experts"),
        top_k=config.number("num_experts_per_tok"),
        width=config.number("intermediate_size"),
        scores="chosen_softmax",
        renormalise=False,
        router_bias=True,
        clamp=config.positive("swiglu_limit", 7.0),
        alpha=config.positive("swiglu_alpha", 1.702),
        style="gpt_oss",
    )
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.number("num_hidden_layers"))]
    rope = plain_rope(config, theta=1.5e5)
    windows = layer_windows(config, default, config.get("sliding_window", 128))
    layers = tuple(LayerSpec(rope=rope, window=window, moe=moe) for window in windows)
    bias = config.flag("attention_bias", True)
    return plain_spec(config, layers, activation="silu", attention_sinks=True, attention_bias=bias, output_bias=bias)


def _check_groups(moe: MoeSpec) -> None:
    if moe.groups < 1 or moe.num_experts % moe.groups or not 1 <= moe.top_groups <= moe.groups:
        raise ModelError(
            f"{moe.num_experts} experts in n_group={moe.groups}, topk_group={moe.top_groups} of them chosen"
        )
    each = moe.num_experts // moe.groups
    if (moe.groups > 1 and each < 2) or moe.top_k > each * moe.top_groups:
        raise ModelError(
            f"num_experts_per_tok={moe.top_k} of {moe.top_groups} groups of {each} experts is not possible"
        )


def gemma2(config: Config) -> ModelSpec:
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.number("num_hidden_layers"))]
    windows = layer_windows(config, default, config.get("sliding_window", 4096))
    rope = plain_rope(config)
    layers = tuple(LayerSpec(rope=rope, window=window) for window in windows)
    return _gemma(
        config,
        layers,
        attention_softcap=config.get("attn_logit_softcapping", 50.0),
        final_softcap=config.get("final_logit_softcapping", 30.0),
    )


def gemma3(config: Config) -> ModelSpec:
    pattern = config.number("sliding_window_pattern", config.number("_sliding_window_pattern", 6))
    count = config.number("num_hidden_layers")
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    windows = layer_windows(config, default, config.get("sliding_window", 4096))
    config.number("head_dim")
    near, far = ropes_by_type(config, theta=1e6, local_theta=config.get("rope_local_base_freq", 1e4))
    layers = tuple(LayerSpec(rope=far if window is None else near, window=window) for window in windows)
    softcaps = config.get("attn_logit_softcapping"), config.get("final_logit_softcapping")
    return _gemma(config, layers, qk_norm="head", attention_softcap=softcaps[0], final_softcap=softcaps[1])


def phi3(config: Config) -> ModelSpec:
    config.ignore("resid_pdrop", "embd_pdrop")
    original = config.get("original_max_position_embeddings")
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn", "longrope"):
        parameters["rope_type"] = "longrope"
        parameters.setdefault("original_max_position_embeddings", original)
    rope = rope_spec(
        parameters, config.get("rope_theta", 1e4), config.head_dim(), config.number("max_position_embeddings", 4096)
    )
    layers = same_layers(config, rope=rope, window=config.get("sliding_window"))
    return plain_spec(config, layers, fused_qkv=True, fused_gate_up=True)


def olmo2(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    layers = same_layers(config, rope=plain_rope(config))
    return plain_spec(config, layers, qk_norm="full", norm_order="post", attention_bias=bias, output_bias=bias)


def olmo3(config: Config) -> ModelSpec:
    """olmo2 with windows on three of four layers; contexts are scaled on the other layers only."""
    count = config.number("num_hidden_layers")
    default = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
    windows = layer_windows(config, default, config.get("sliding_window", 4096))
    near, far = ropes_by_type(config, theta=5e5, local_theta=config.get("rope_theta", 5e5))
    layers = tuple(LayerSpec(rope=far if window is None else near, window=window) for window in windows)
    bias = config.flag("attention_bias")
    return plain_spec(config, layers, qk_norm="full", norm_order="post", attention_bias=bias, output_bias=bias)


def exaone4(config: Config) -> ModelSpec:
    """Windows on three of four layers, and where there are any the other layers have no rope."""
    window, pattern = config.get("sliding_window", 4096), config.get("sliding_window_pattern", 4)
    count = config.number("num_hidden_layers")
    turns = window is not None and isinstance(pattern, int) and pattern > 0
    if not turns and window is not None and config.get("layer_types") is None:
        raise ModelError(f"sliding_window_pattern={pattern!r} is not handled", "name each layer's kind in layer_types")
    default = ["sliding_attention" if turns and (i + 1) % pattern else "full_attention" for i in range(count)]
    rope = plain_rope(config)
    layers = tuple(
        LayerSpec(rope=None if window is not None and near is None else rope, window=near)
        for near in layer_windows(config, default, window)
    )
    return plain_spec(config, layers, qk_norm="head", norm_order="post")


def granite(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return plain_spec(
        config,
        same_layers(config, rope=plain_rope(config)),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logits_scaling=config.positive("logits_scaling", 1.0),
    )


def seed_oss(config: Config) -> ModelSpec:
    config.ignore("residual_dropout", "pretraining_tp")
    config.number("head_dim")
    return plain_spec(
        config,
        same_layers(config, rope=plain_rope(config)),
        attention_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


def arcee(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return plain_spec(
        config,
        same_layers(config, rope=plain_rope(config)),
        activation=config.get("hidden_act", "relu2"),
        gated=False,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )


def ernie4_5(config: Config) -> ModelSpec:
    config.number("head_dim")
    bias = config.flag("use_bias")
    layers = same_layers(config, rope=replace(plain_rope(config, theta=5e5), interleaved=True))
    return plain_spec(config, layers, tied_default=True, attention_bias=bias, output_bias=bias, mlp_bias=bias)


def glm4(config: Config) -> ModelSpec:
    config.number("head_dim")
    layers = same_layers(config, rope=replace(plain_rope(config, part=0.5), interleaved=True))
    return plain_spec(
        config,
        layers,
        norm_order="both",
        norm_names=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        fused_gate_up=True,
        attention_bias=config.flag("attention_bias", True),
    )


def ministral3(config: Config) -> ModelSpec:
    """llama with YaRN, and queries that grow with their position."""
    config.number("head_dim")
    given = dict(config.get("rope_parameters") or {})
    beta = given.pop("llama_4_scaling_beta", None)
    if beta is None or not given.get("original_max_position_embeddings"):
        raise ModelError(
            "rope_parameters of a ministral3 model lacks llama_4_scaling_beta or original_max_position_embeddings",
            "every model of this family gives both",
        )
    positions = config.number("max_position_embeddings")
    if given.pop("max_position_embeddings", positions) != positions:
        raise ModelError("rope_parameters has another max_position_embeddings than the model", "copy the file again")
    rope = rope_spec(given, config.get("rope_theta", 1e6), config.head_dim(), positions)
    layers = same_layers(config, rope=replace(rope, query_scale_beta=float(beta)), window=config.get("sliding_window"))
    return plain_spec(config, layers)


def smollm3(config: Config) -> ModelSpec:
    count, interval = config.number("num_hidden_layers"), config.number("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    window = config.get("sliding_window") if config.flag("use_sliding_window") else None
    config.ignore("sliding_window", "max_window_layers")
    default = ["full_attention" if window is None or turned else "sliding_attention" for turned in turns]
    windows = layer_windows(config, default, window)
    rope, bias = plain_rope(config, theta=2e6), config.flag("attention_bias")
    layers = tuple(LayerSpec(rope=rope if turns[i] else None, window=windows[i]) for i in range(count))
    return plain_spec(
        config, layers, tied_default=True, attention_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias")
    )


FAMILIES: dict[str, Family] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3_vl,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "exaone4": exaone4,
    "granite": granite,
    "seed_oss": seed_oss,
    "arcee": arcee,
    "ernie4_5": ernie4_5,
    "glm4": glm4,
    "ministral3": ministral3,
    "smollm3": smollm3,
}


def _gemma(config: Config, layers: tuple[LayerSpec, ...], **more: Any) -> ModelSpec:
    if config.flag("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not handled", "only causal language models are served")
    config.ignore("hidden_act")
    bias = config.flag("attention_bias")
    return plain_spec(
        config,
        layers,
        tied_default=True,
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=float(config.number("query_pre_attn_scalar", 256)) ** -0.5,
        attention_bias=bias,
        output_bias=bias,
        norm_order="both",
        norm_offset=True,
        embedding_scale=config.number("hidden_size") ** 0.5,
        **more,
    )


def _qwen_layers(config: Config) -> tuple[LayerSpec, ...]:
    count, first = config.number("num_hidden_layers"), config.number("max_window_layers", 28)
    window = config.get("sliding_window", 4096)
    window = window if config.flag("use_sliding_window") else None
    default = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(count)]
    rope = plain_rope(config)
    return tuple(LayerSpec(rope=rope, window=w) for w in layer_windows(config, default, window))


def _moe_layers(config: Config, windows: list[int | None], shared: int) -> tuple[LayerSpec, ...]:
    """Layers of which each `decoder_sparse_step`-th has experts, unless `mlp_only_layers` names it."""
    config.ignore("router_aux_loss_coef", "output_router_logits", "num_local_experts")
    step, dense = config.number("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    moe = MoeSpec(
        num_experts=config.number("num_experts", config.number("num_local_experts", 128)),
        top_k=config.number("num_experts_per_tok"),
        width=config.number("moe_intermediate_size"),
        shared_width=shared,
        renormalise=config.flag("norm_topk_prob"),
    )
    rope = plain_rope(config)
    return tuple(
        LayerSpec(rope=rope, window=window, moe=moe if i not in dense and (i + 1) % step == 0 else None)
        for i, window in enumerate(windows)
    )
