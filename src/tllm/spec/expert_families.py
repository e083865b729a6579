"""The families with experts, with attention over latents, and with gated delta nets, most of which have experts too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.config_parts import all_but_each, layer_windows, plain_rope, plain_spec, same_layers
from tllm.spec.hf_config import Config
from tllm.spec.model_spec import DeltaSpec, LatentSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec
from tllm.spec.rope_config import rope_spec, yarn_scale

NUM_EXPERTS = {"qwen2_moe": 60, "qwen3_moe": 128, "qwen3_next": 512, "qwen3_5_moe_text": 256}
SCALING = {"deepseek_v3": 2.5, "kimi_k2": 2.5, "glm4_moe_lite": 1.8}
SHARED = {"deepseek_v2": 2}
"""How many experts there are, how their weights are scaled and how many are shared, where a file leaves it out."""


def mixtral(config: Config) -> ModelSpec:
    config.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    moe = MoeSpec(
        num_experts=config.same_number("num_local_experts", "num_experts", default=8),
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
    """Experts chosen by sigmoids with a correction, as in DeepSeek-V3, behind the first, dense layers."""
    moe = _corrected_experts(config)
    rope, dense = plain_rope(config, part=0.5), config.number("first_k_dense_replace", 1)
    count = config.number("num_hidden_layers")
    layers = tuple(LayerSpec(rope=rope, moe=moe if i >= dense else None) for i in range(count))
    bias, norm = config.flag("attention_bias"), config.flag("use_qk_norm")
    return plain_spec(config, layers, qk_norm="head" if norm else "none", attention_bias=bias)


def _corrected_experts(config: Config) -> MoeSpec:
    """Of DeepSeek-V3 (2412.19437): a correction joins in the choice, which is among the best groups."""
    if config.get("scoring_func", "sigmoid") != "sigmoid" or config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ModelError(f"scoring_func or topk_method of this {config.family} model is not that of DeepSeek-V3")
    return _grouped_experts(config)


def _grouped_experts(config: Config) -> MoeSpec:
    """Experts of which those of the best groups are chosen, by DeepSeek-V3's keys."""
    config.ignore("output_router_logits", "num_nextn_predict_layers", "num_mtp_layers")
    width = config.number("moe_intermediate_size")
    moe = MoeSpec(
        num_experts=config.same_number("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=config.number("num_experts_per_tok"),
        width=width,
        shared_width=width * config.number("n_shared_experts", SHARED.get(config.family, 1)),
        shared_gate=False,
        scores="sigmoid",
        renormalise=config.flag("norm_topk_prob", True, null=False),
        weight_scale=config.positive("routed_scaling_factor", SCALING.get(config.family, 1.0)),
        correction_bias=True,
        groups=config.number("n_group", 1),
        top_groups=config.number("topk_group", 1),
        style="glm",
    )
    _check_groups(moe)
    return moe


def deepseek_v3(config: Config) -> ModelSpec:
    """DeepSeek-V3 (2412.19437): attention over latents, and experts as glm4_moe has them."""
    return _with_latents(config, _deepseek_layers(config, _corrected_experts(config)))


def deepseek_v2(config: Config) -> ModelSpec:
    """DeepSeek-V2 (2405.04434): attention over latents, and experts by their softmax, from the best groups."""
    method = config.get("topk_method", "greedy")
    if config.get("scoring_func", "softmax") != "softmax" or method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"scoring_func or topk_method={method!r} of this {config.family} model is not handled")
    if config.flag("norm_topk_prob"):
        raise ModelError("norm_topk_prob of a deepseek_v2 model is not handled", "no published model sets it")
    if config.flag("mlp_bias") or not config.get("rope_interleave", True):
        raise ModelError(
            "mlp_bias or rope_interleave of this deepseek_v2 model is not handled", "no published one sets it"
        )
    grouped, experts = method == "group_limited_greedy", _grouped_experts(config)
    moe = replace(
        experts,
        scores="softmax",
        renormalise=False,
        correction_bias=False,
        groups=experts.groups if grouped else 1,
        top_groups=experts.top_groups if grouped else 1,
        group_best=1,
    )
    return _with_latents(config, _deepseek_layers(config, moe))


def glm4_moe_lite(config: Config) -> ModelSpec:
    """glm4_moe with attention over latents."""
    count = config.number("num_hidden_layers")
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise ModelError(f"mlp_layer_types {sorted(set(kinds))} for {len(kinds)} of {count} layers is not handled")
    config.ignore("first_k_dense_replace", "partial_rotary_factor")
    return _with_latents(config, [_corrected_experts(config) if kind == "sparse" else None for kind in kinds])


def _deepseek_layers(config: Config, moe: MoeSpec) -> list[MoeSpec | None]:
    if config.number("moe_layer_freq", 1) != 1:
        raise ModelError(f"moe_layer_freq={config.get('moe_layer_freq')} is not handled", "published models have 1")
    dense = config.number("first_k_dense_replace")
    return [moe if i >= dense else None for i in range(config.number("num_hidden_layers"))]


def _with_latents(config: Config, moes: list[MoeSpec | None]) -> ModelSpec:
    """A model whose attention is over latents (2405.04434), with the experts of each layer, or none."""
    config.ignore("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim")
    heads = config.number("num_attention_heads")
    if config.number("num_key_value_heads", heads) != heads:
        raise ModelError("num_key_value_heads is not num_attention_heads: all heads of this family share one latent")
    latent = LatentSpec(
        width=config.number("kv_lora_rank"),
        rope_dim=config.same_number("qk_rope_head_dim", "head_dim"),
        plain_dim=config.number("qk_nope_head_dim"),
        value_dim=config.number("v_head_dim"),
        q_width=config.number("q_lora_rank", 0),
    )
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    part = parameters.pop("partial_rotary_factor", None)
    if part not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor={part} is not handled: qk_rope_head_dim says what is rotated")
    rope = rope_spec(
        parameters, config.positive("rope_theta", 1e4), latent.rope_dim, config.number("max_position_embeddings")
    )
    rope = replace(rope, interleaved=config.flag("rope_interleave", True, null=False))
    bias, scale = config.flag("attention_bias"), latent.query_dim**-0.5
    if rope.kind != "default" and parameters.get("mscale_all_dim"):
        scale *= yarn_scale(rope.factor, float(parameters["mscale_all_dim"])) ** 2
    layers = tuple(LayerSpec(rope=rope, moe=moe) for moe in moes)
    spec = plain_spec(config, layers, attention_scale=scale, attention_bias=bias, output_bias=bias)
    return replace(spec, latent=latent, head_dim=latent.width + latent.rope_dim, num_kv_heads=1)


def minimax_m2(config: Config) -> ModelSpec:
    """Experts of mixtral's names, chosen by corrected sigmoids; norms over all heads; partial rope."""
    config.ignore("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
    config.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    config.ignore("mlp_intermediate_size", "shared_moe_mode")  # of an MLP and shared experts that it does not have
    head_dim = config.number("head_dim")
    fixed = dict(scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True)
    fixed |= dict.fromkeys((f"layernorm_{of}_beta" for of in ("full_attention", "linear_attention", "mlp")), 1.0)
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise ModelError(f"{key}={config.get(key)!r} of a minimax_m2 model is not handled", f"known: {value!r}")
    if set(config.get("attn_type_list") or [1]) != {1} or config.number("shared_intermediate_size", 0):
        raise ModelError("attn_type_list or shared_intermediate_size of this minimax_m2 model is not handled")
    moe = MoeSpec(
        num_experts=config.same_number("num_local_experts", "num_experts"),
        top_k=config.number("num_experts_per_tok"),
        width=config.number("intermediate_size"),
        scores="sigmoid",
        correction_bias=True,
        style="minimax",
    )
    part = config.number("rotary_dim", head_dim) / head_dim
    rope = plain_rope(config, theta=5e6, part=part)
    return plain_spec(config, same_layers(config, rope=rope, moe=moe), qk_norm="full")


def gpt_oss(config: Config) -> ModelSpec:
    """Sinks, windows on every other layer, and experts in stacks with biases and a clamped activation."""
    config.ignore("router_aux_loss_coef", "output_router_logits", "hidden_act")
    config.ignore("initial_context_length")  # original_max_position_embeddings under an older name
    config.number("head_dim")
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise ModelError("config.json has no rope_scaling", "every model of this family gives it")
    moe = MoeSpec(
        num_experts=config.same_number("num_local_experts", "num_experts"),
        top_k=config.same_number("num_experts_per_tok", "experts_per_token"),
        width=config.number("intermediate_size"),
        scores="chosen_softmax",
        renormalise=False,
        router_bias=True,
        clamp=config.positive("swiglu_limit", 7.0),
        alpha=config.positive("swiglu_alpha", 1.702),
        style="gpt_oss",
    )
    default = all_but_each(config.number("num_hidden_layers"), 2)
    rope = plain_rope(config, theta=1.5e5)
    windows = layer_windows(config, default, config.get("sliding_window", 128))
    layers = tuple(LayerSpec(rope=rope, window=window, moe=moe) for window in windows)
    bias = config.flag("attention_bias", True)
    return plain_spec(config, layers, activation="silu", attention_sinks=True, attention_bias=bias, output_bias=bias)


def qwen3_next(config: Config) -> ModelSpec:
    """Gated delta nets on three of four layers, attention with output gates on the others; experts behind both."""
    layers = _moe_layers(
        config,
        [None] * config.number("num_hidden_layers"),
        config.number("shared_expert_intermediate_size", 512),
        rope=_quarter_rope(config),
        renormalise=config.flag("norm_topk_prob", True),
    )
    return _with_delta_nets(config, layers, fused=True)


def qwen3_5(config: Config) -> ModelSpec:
    """The same without experts."""
    layers = same_layers(config, rope=_quarter_rope(config))
    return _with_delta_nets(config, layers, fused=False)


def qwen3_5_moe(config: Config) -> ModelSpec:
    """The same with experts behind every layer."""
    config.ignore("intermediate_size")
    shared = config.number("shared_expert_intermediate_size", 512)
    count = config.number("num_hidden_layers")
    layers = _moe_layers(config, [None] * count, shared, rope=_quarter_rope(config), renormalise=True)
    return _with_delta_nets(config, layers, fused=False, intermediate_size=config.number("moe_intermediate_size"))


def _quarter_rope(config: Config) -> RopeSpec:
    """Over a quarter of a head. On text the three rotary sections have equal positions, so they are one."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = {key: value for key, value in given.items() if not key.startswith("mrope_")}
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    config.number("head_dim")
    theta, positions = config.positive("rope_theta", 1e4), config.number("max_position_embeddings", 32768)
    return rope_spec(parameters, theta, config.head_dim(), positions)


def _with_delta_nets(config: Config, layers: tuple[LayerSpec, ...], fused: bool, **more: Any) -> ModelSpec:
    """Some of the layers have a gated delta net in attention's place: those that `layer_types` calls so."""
    apart = config.get("_gguf_heads")  # how a GGUF file has them, which the converter has sorted
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "mlp_only_layers")
    delta = DeltaSpec(
        key_heads=config.number("linear_num_key_heads", 16),
        value_heads=config.number("linear_num_value_heads", 32),
        key_dim=config.number("linear_key_head_dim", 128),
        value_dim=config.number("linear_value_head_dim", 128),
        kernel=config.number("linear_conv_kernel_dim", 4),
        fused=fused and not apart,
        fused_ba=fused,
        tiled=apart == "tiled",
    )
    if delta.value_heads % delta.key_heads:
        raise ModelError(f"{delta.value_heads} value heads cannot share {delta.key_heads} key heads evenly")
    if config.get("hidden_act", "silu") != "silu" or config.get("attn_output_gate", True) is False:
        raise ModelError(f"hidden_act or attn_output_gate of this {config.family} model is not handled")
    default = all_but_each(len(layers), max(1, config.number("full_attention_interval", 4)), "linear_attention")
    kinds = config.get("layer_types") or default
    if set(kinds) - {"linear_attention", "full_attention"} or len(kinds) != len(layers):
        raise ModelError(f"layer_types {sorted(set(kinds))} for {len(kinds)} of {len(layers)} layers is not handled")
    mixed = tuple(
        replace(layer, delta=delta, rope=None) if kind == "linear_attention" else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )
    bias = config.flag("attention_bias")
    return plain_spec(
        config,
        mixed,
        qk_norm="head",
        norm_offset=True,
        attention_gate=True,
        attention_bias=bias,
        output_bias=bias,
        **more,
    )


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


def _moe_layers(
    config: Config,
    windows: list[int | None],
    shared: int,
    rope: RopeSpec | None = None,
    renormalise: bool | None = None,
) -> tuple[LayerSpec, ...]:
    """Layers of which each `decoder_sparse_step`-th has experts, unless `mlp_only_layers` names it."""
    config.ignore("router_aux_loss_coef", "output_router_logits")
    step, dense = config.number("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    moe = MoeSpec(
        num_experts=config.same_number("num_experts", "num_local_experts", default=NUM_EXPERTS[config.family]),
        top_k=config.number("num_experts_per_tok"),
        width=config.number("moe_intermediate_size"),
        shared_width=shared,
        renormalise=config.flag("norm_topk_prob") if renormalise is None else renormalise,
    )
    rope = rope or plain_rope(config)
    return tuple(
        LayerSpec(rope=rope, window=window, moe=moe if i not in dense and (i + 1) % step == 0 else None)
        for i, window in enumerate(windows)
    )
