"""The model families: for each `model_type`, how its `config.json` becomes a `ModelSpec`. The only reader of that file.

A family is one function of a `Config`, which hands out keys and remembers them. A key nobody asked for is an error
that names it, since it may change the maths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tllm.core.errors import ModelError, counted
from tllm.spec.config_parts import (
    all_but_each,
    both_ways,
    layer_windows,
    plain_rope,
    plain_spec,
    rope_parameters_by_type,
    ropes_by_type,
    same_layers,
)
from tllm.spec.config_types import is_number, is_size
from tllm.spec.expert_families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    minimax_m2,
    mixtral,
    qwen2_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from tllm.spec.hf_config import MULTIMODAL, Config, text_config
from tllm.spec.model_spec import LayerSpec, ModelSpec, MoeSpec
from tllm.spec.rope_config import rope_spec

Family = Callable[[Config], ModelSpec]


def spec_from_config(raw: dict[str, Any]) -> ModelSpec:
    """Read a Hugging Face `config.json`. Raises ModelError for an unknown architecture or an unhandled key.

    Of a multimodal model the text part is read.
    """
    raw = text_config(raw)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        named = raw.get("architectures") or kind
        known = ", ".join(sorted([*FAMILIES, *MULTIMODAL]))
        raise ModelError(f"model_type {kind!r} ({named}) is not known", f"known: {known}")
    config = Config(raw)
    spec = FAMILIES[kind](config)
    config.check_all_read()
    if any(layer.window == 0 for layer in spec.layers):
        raise ModelError("config.json: sliding_window=0 and there are layers with a window", "copy the file again")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{counted(spec.num_heads, 'query head')} cannot share {counted(spec.num_kv_heads, 'kv head')} evenly"
        )
    for moe in {layer.moe for layer in spec.layers} - {None}:
        if moe is not None and not 1 <= moe.top_k <= moe.num_experts:
            raise ModelError(f"config.json chooses {moe.top_k} experts of {moe.num_experts}", "copy the file again")
    for of_layer in {layer.num_kv_heads for layer in spec.layers} - {0}:
        if spec.num_heads % of_layer:
            raise ModelError(
                f"{counted(spec.num_heads, 'query head')} cannot share the {counted(of_layer, 'kv head')} of "
                "a layer evenly"
            )
    return both_ways(spec) if config.raw.get("is_causal") is False else spec


def llama(config: Config) -> ModelSpec:
    if config.get("activation") not in (None, "swiglu"):  # in files of Falcon3, beside hidden_act
        raise ModelError(f"activation={config.get('activation')!r} of a llama model is not handled", "known: swiglu")
    bias = config.flag("attention_bias")
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
        plain, config.positive("rope_theta", 5e5), config.head_dim(), config.number("max_position_embeddings", 128000)
    )
    config.ignore("rope_parameters", "rope_scaling")
    bias = config.flag("attention_bias")
    return plain_spec(config, same_layers(config, rope=rope), qk_norm="head", attention_bias=bias, output_bias=bias)


def gemma2(config: Config) -> ModelSpec:
    default = all_but_each(config.number("num_hidden_layers"), 2)
    windows = layer_windows(config, default, config.get("sliding_window", 4096))
    if config.flag("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention of a gemma2 model is not handled", "no published model sets it")
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
    if pattern < 1:
        raise ModelError(f"config.json: sliding_window_pattern={pattern} is not 1 or more")
    default = all_but_each(count, pattern)
    windows = layer_windows(config, default, config.get("sliding_window", 4096))
    bidirectional = config.flag("use_bidirectional_attention")
    if bidirectional:  # the file counts the keys on both sides
        windows = [None if window is None else window // 2 + 1 for window in windows]
    config.number("head_dim")
    near, far = ropes_by_type(config, theta=1e6, local_theta=config.positive("rope_local_base_freq", 1e4))
    layers = tuple(LayerSpec(rope=far if window is None else near, window=window) for window in windows)
    if config.get("attn_logit_softcapping") is not None:
        raise ModelError("attn_logit_softcapping of a gemma3 model is not handled", "no published model sets it")
    cap = config.get("final_logit_softcapping")
    return _gemma(config, layers, qk_norm="head", final_softcap=cap, bidirectional=bidirectional)


def gemma4(config: Config) -> ModelSpec:
    """Layers with a window, and layers that see all, whose heads are wider and fewer and may have no values of their
    own. Norms of queries, keys and values take the place of a scale of scores.
    """
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError("use_bidirectional_attention='all' is not handled", "only causal language models are served")
    count, window = config.number("num_hidden_layers"), config.number("sliding_window")
    default = all_but_each(count, 6)
    default[-1:] = ["full_attention"]
    windows = layer_windows(config, default, window)
    if windows[-1] is not None:
        raise ModelError("layer_types: the last layer of a gemma4 model has sliding_attention", "copy the file again")
    far_heads, near_dim, shared = (
        _far_heads(config, windows),
        config.number("head_dim"),
        config.flag("attention_k_eq_v"),
    )
    turns_near, turns_far = rope_parameters_by_type(config)
    for given in (turns_near, turns_far):
        if given.get("rope_type", "default") == "default" and given.get("partial_rotary_factor") not in (None, 1.0):
            raise ModelError(f"partial_rotary_factor={given['partial_rotary_factor']} of a default rope is not handled")
    positions = config.number("max_position_embeddings")
    near = rope_spec(turns_near, 1e4, near_dim, positions)
    turned = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    far = rope_spec(turns_far or turned, 1e6, far_heads[0], positions)
    moe = _experts_of_gemma4(config)
    of_near = LayerSpec(rope=near, window=window, moe=moe)
    of_far = LayerSpec(rope=far, moe=moe, head_dim=far_heads[0], num_kv_heads=far_heads[1], keys_are_values=shared)
    layers = _sharing_layers(config, tuple(of_far if window is None else of_near for window in windows))
    bias = config.flag("attention_bias")
    return plain_spec(
        config,
        layers,
        tied_default=True,
        per_layer_width=_per_layer_width(config),
        activation=config.get("hidden_activation") or "gelu_pytorch_tanh",
        attention_scale=1.0,
        attention_bias=bias,
        output_bias=bias,
        qk_norm="head",
        value_norm=True,
        layer_scale=True,
        norm_order="both",
        embedding_scale=config.number("hidden_size") ** 0.5,
        final_softcap=config.get("final_logit_softcapping"),
    )


def phi3(config: Config) -> ModelSpec:
    config.ignore("resid_pdrop", "embd_pdrop")
    for key in ("full_attn_mod", "interpolate_factor"):  # in files of Phi-4-mini, which nothing reads
        if config.number(key, 1) != 1:
            raise ModelError(f"{key}={config.get(key)} of a phi3 model is not handled", "published models have 1")
    original = config.number("original_max_position_embeddings", 4096)
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn", "longrope"):
        parameters["rope_type"] = "longrope"
        inside = parameters.setdefault("original_max_position_embeddings", original)
        if inside != original:
            raise ModelError(
                f"original_max_position_embeddings is {original}, and {inside} where rope is scaled",
                "of a phi3 model both must be the same",
            )
    rope = rope_spec(
        parameters,
        config.positive("rope_theta", 1e4),
        config.head_dim(),
        config.number("max_position_embeddings", 4096),
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
    windows = layer_windows(config, all_but_each(count, 4), config.get("sliding_window", 4096))
    if config.positive("rope_theta", 5e5) != 5e5 and not rope_parameters_by_type(config)[0]:
        raise ModelError(
            f"rope_theta={config.get('rope_theta')} of an olmo3 model: whether layers with a window have it depends on "
            "who reads the file",
            "give both kinds of layers their rope_theta in rope_parameters",
        )
    near, far = ropes_by_type(config, theta=5e5, local_theta=5e5)
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
    default = all_but_each(count, pattern if turns else 1)
    rope = plain_rope(config)
    layers = tuple(
        LayerSpec(rope=None if window is not None and near is None else rope, window=near)
        for near in layer_windows(config, default, window)
    )
    return plain_spec(config, layers, qk_norm="head", norm_order="post")


def granite(config: Config) -> ModelSpec:
    bias, multiplier = config.flag("attention_bias"), config.positive("embedding_multiplier", 1.0)
    return plain_spec(
        config,
        same_layers(config, rope=plain_rope(config)),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        embedding_scale=multiplier,
        noise_scale=multiplier,
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logits_scaling=config.positive("logits_scaling", 1.0),
    )


def seed_oss(config: Config) -> ModelSpec:
    config.ignore("residual_dropout")
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
    if not is_number(beta) or not given.get("original_max_position_embeddings"):
        raise ModelError(
            "rope_parameters of a ministral3 model lacks llama_4_scaling_beta or original_max_position_embeddings",
            "every model of this family gives both, a number each",
        )
    positions = config.number("max_position_embeddings")
    if given.pop("max_position_embeddings", positions) != positions:
        raise ModelError("rope_parameters has another max_position_embeddings than the model", "copy the file again")
    rope = rope_spec(given, config.positive("rope_theta", 1e6), config.head_dim(), positions)
    layers = same_layers(config, rope=replace(rope, query_scale_beta=float(beta)), window=config.get("sliding_window"))
    return plain_spec(config, layers)


def smollm3(config: Config) -> ModelSpec:
    count, interval = config.number("num_hidden_layers"), config.number("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if len(turns) != count:
        raise ModelError(
            f"no_rope_layers is of {counted(len(turns), 'layer')} and the model has {count}", "copy config.json again"
        )
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
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "minimax_m2": minimax_m2,
    "gpt_oss": gpt_oss,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
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
    config.ignore("hidden_act")
    bias = config.flag("attention_bias")
    return plain_spec(
        config,
        layers,
        tied_default=True,
        activation=config.get("hidden_activation") or "gelu_pytorch_tanh",
        attention_scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        attention_bias=bias,
        output_bias=bias,
        norm_order="both",
        norm_offset=True,
        embedding_scale=config.number("hidden_size") ** 0.5,
        **more,
    )


def _per_layer_width(config: Config) -> int:
    """Widths of each layer's own input (E2B, E4B); 0 in models that have none."""
    width = config.number("hidden_size_per_layer_input", 256 if config.family == "gemma4_text" else 0)
    rows, tokens = config.number("vocab_size_per_layer_input", 262144), config.number("vocab_size")
    if width and rows != tokens:
        raise ModelError(
            f"vocab_size_per_layer_input={rows} of this {config.family} model is not its vocab_size={tokens}",
            "in published models they are equal",
        )
    return width


def _sharing_layers(config: Config, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The same where the last ones use the keys and values of earlier layers, and may have MLPs twice as wide."""
    shared, wide = config.number("num_kv_shared_layers", 0), config.flag("use_double_wide_mlp")
    if not shared:
        return layers
    own, sharing = layers[: max(0, len(layers) - shared)], layers[-shared:]
    if {layer.window for layer in sharing} - {layer.window for layer in own}:
        raise ModelError(
            f"num_kv_shared_layers={shared} of {len(layers)} layers: none before them has keys of one of their kinds",
            "copy the file again",
        )
    if wide and any(layer.moe for layer in sharing):
        raise ModelError("use_double_wide_mlp beside experts is not handled", "no published model has both")
    width = 2 * config.number("intermediate_size") if wide else 0
    return (*own, *(replace(layer, shares_keys=True, mlp_width=width) for layer in sharing))


def _experts_of_gemma4(config: Config) -> MoeSpec | None:
    """The experts of a layer, which stand beside its MLP; None in a model that has none."""
    if not config.flag("enable_moe_block"):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    return MoeSpec(
        num_experts=config.number("num_experts"),
        top_k=config.number("top_k_experts"),
        width=config.number("moe_intermediate_size"),
        shared_width=config.number("intermediate_size"),
        shared_gate=False,
        beside_mlp=True,
        style="gemma4",
    )


def _far_heads(config: Config, windows: list[int | None]) -> tuple[int, int]:
    """The width and number of key-value heads of layers that see all. A file gives them for the model, or as
    transformers writes it, in `per_layer_config` for each of these layers."""
    kv_heads = config.number("num_key_value_heads")
    others = config.number("num_global_key_value_heads", 0)
    if config.family == "gemma4_text" and not config.flag("attention_k_eq_v"):
        others = 0
    of_model = (config.number("global_head_dim", 512), others or kv_heads)
    given = config.get("per_layer_config")
    if given is None:
        return of_model
    expected = {str(i) for i, window in enumerate(windows) if window is None}
    if not isinstance(given, dict) or set(given) != expected:
        raise ModelError(
            f"per_layer_config is not of the layers with full_attention ({', '.join(sorted(expected, key=int))})",
            "copy the file again",
        )
    sizes = [_far_heads_of_layer(of, config.number("head_dim"), kv_heads) for of in given.values()]
    if not sizes or sizes[0] is None or any(size != sizes[0] for size in sizes):
        raise ModelError(
            f"per_layer_config {str(given)[:80]} is not handled", "layers with full_attention are all alike"
        )
    return sizes[0]


def _far_heads_of_layer(given: Any, head_dim: int, kv_heads: int) -> tuple[int, int] | None:
    """The same of one layer, from its entry in `per_layer_config`; None where that is none."""
    if not isinstance(given, dict) or set(given) - {"head_dim", "num_key_value_heads"}:
        return None
    width, heads = given.get("head_dim", head_dim), given.get("num_key_value_heads", kv_heads)
    return (int(width), int(heads)) if is_size(width) and is_size(heads) else None


def _qwen_layers(config: Config) -> tuple[LayerSpec, ...]:
    count, first = config.number("num_hidden_layers"), config.number("max_window_layers", 28)
    window = config.get("sliding_window", 4096)
    window = window if config.flag("use_sliding_window") else None
    default = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(count)]
    rope = plain_rope(config)
    return tuple(LayerSpec(rope=rope, window=w) for w in layer_windows(config, default, window))
