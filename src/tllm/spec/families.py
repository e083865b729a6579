"""The model families: for each `model_type`, how its `config.json` becomes a `ModelSpec`. The only reader of that file.

A family is one function of a `Config`, which hands out keys and remembers them. A key nobody asked for is an error
that names it, since it may change the maths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.hf_config import Config
from tllm.spec.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from tllm.spec.rope_config import rope_spec

Family = Callable[[Config], ModelSpec]


def spec_from_config(raw: dict[str, Any]) -> ModelSpec:
    """Read a Hugging Face `config.json`. Raises ModelError for an unknown architecture or an unhandled key."""
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        named = raw.get("architectures") or kind
        raise ModelError(f"model_type {kind!r} ({named}) is not known", "known: " + ", ".join(sorted(FAMILIES)))
    config = Config(raw)
    spec = FAMILIES[kind](config)
    config.check_all_read()
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} kv heads evenly")
    return spec


def llama(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    config.ignore("pretraining_tp")
    layers = _same_layers(config, rope=_rope(config))
    return _spec(config, layers, attention_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(config: Config) -> ModelSpec:
    return _spec(config, _same_layers(config, rope=_rope(config), window=config.get("sliding_window", 4096)))


def qwen2(config: Config) -> ModelSpec:
    return _spec(config, _qwen_layers(config), attention_bias=True)


def qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return _spec(config, _qwen_layers(config), qk_norm="head", attention_bias=bias, output_bias=bias)


def mixtral(config: Config) -> ModelSpec:
    config.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    moe = MoeSpec(
        num_experts=config.number("num_local_experts", 8),
        top_k=config.number("num_experts_per_tok", 2),
        width=config.number("intermediate_size"),
        style="mixtral",
    )
    rope = _rope(config, theta=1e6)
    return _spec(config, _same_layers(config, rope=rope, window=config.get("sliding_window"), moe=moe))


def qwen2_moe(config: Config) -> ModelSpec:
    shared = config.number("shared_expert_intermediate_size", 5632)
    sliding = config.flag("use_sliding_window")
    window, windowed = config.get("sliding_window", 4096), config.number("max_window_layers", 28)
    count = config.number("num_hidden_layers")
    default = [
        "sliding_attention" if sliding and i % 2 == 0 and i < windowed else "full_attention" for i in range(count)
    ]
    windows = _windows(config, default, window if sliding else None)
    return _spec(config, _moe_layers(config, windows, shared), attention_bias=config.flag("qkv_bias", True))


def qwen3_moe(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    window = config.get("sliding_window", 4096) if config.flag("use_sliding_window") else None
    config.ignore("max_window_layers", "sliding_window")
    layers = _moe_layers(config, [window] * config.number("num_hidden_layers"), shared=0)
    return _spec(config, layers, qk_norm="head", attention_bias=bias, output_bias=bias)


def gemma2(config: Config) -> ModelSpec:
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.number("num_hidden_layers"))]
    windows = _windows(config, default, config.get("sliding_window", 4096))
    rope = _rope(config)
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
    windows = _windows(config, default, config.get("sliding_window", 4096))
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    theta, local = config.get("rope_theta", 1e6), config.get("rope_local_base_freq", 1e4)
    head_dim, positions = config.number("head_dim", 256), config.number("max_position_embeddings", 131072)
    far = rope_spec(parameters.get("full_attention") or scaling, theta, head_dim, positions)
    near = rope_spec(parameters.get("sliding_attention") or {}, local, head_dim, positions)
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
    layers = _same_layers(config, rope=rope, window=config.get("sliding_window"))
    return _spec(config, layers, fused=True)


def olmo2(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    layers = _same_layers(config, rope=_rope(config))
    return _spec(config, layers, qk_norm="full", norm_order="post", attention_bias=bias, output_bias=bias)


def smollm3(config: Config) -> ModelSpec:
    count, interval = config.number("num_hidden_layers"), config.number("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    window = config.get("sliding_window") if config.flag("use_sliding_window") else None
    config.ignore("sliding_window", "max_window_layers")
    default = ["full_attention" if window is None or turned else "sliding_attention" for turned in turns]
    windows = _windows(config, default, window)
    rope, bias = _rope(config, theta=2e6), config.flag("attention_bias")
    layers = tuple(LayerSpec(rope=rope if turns[i] else None, window=windows[i]) for i in range(count))
    return _spec(
        config, layers, tied_default=True, attention_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias")
    )


FAMILIES: dict[str, Family] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "olmo2": olmo2,
    "smollm3": smollm3,
}


def _spec(config: Config, layers: tuple[LayerSpec, ...], *, tied_default: bool = False, **more: Any) -> ModelSpec:
    """What every family reads the same way; `more` is what this one has of its own.

    A key that transformers would fill in differently for each family must be in the file.
    """
    head_dim = config.head_dim()
    more.setdefault("attention_scale", head_dim**-0.5)
    activation = more.pop("activation", None) or config.get("hidden_act", "silu")
    heads = config.number("num_attention_heads")
    return ModelSpec(
        family=config.family,
        vocab_size=config.number("vocab_size"),
        hidden_size=config.number("hidden_size"),
        intermediate_size=config.number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.number(
            "num_key_value_heads", heads if config.family in ("llama", "phi3", "olmo2") else None
        ),
        head_dim=head_dim,
        layers=layers,
        norm_eps=config.positive("rms_norm_eps"),
        activation=_activation(activation),
        max_model_len=_max_model_len(config, layers),
        tied=config.flag("tie_word_embeddings", tied_default),
        dtype=config.dtype(),
        quantization=config.quantization,
        bos_token_id=config.token_ids("bos_token_id")[0] if config.token_ids("bos_token_id") else None,
        eos_token_ids=config.token_ids("eos_token_id"),
        **more,
    )


def _gemma(config: Config, layers: tuple[LayerSpec, ...], **more: Any) -> ModelSpec:
    if config.flag("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not handled", "only causal language models are served")
    config.ignore("hidden_act")
    bias = config.flag("attention_bias")
    return _spec(
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


def _rope(config: Config, theta: float = 1e4) -> RopeSpec:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base, part = config.get("rope_theta", theta), config.get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ModelError(f"partial_rotary_factor={part} is not a key of {config.family}")
    return rope_spec(parameters, base, config.head_dim(), config.number("max_position_embeddings", 2048))


def _same_layers(config: Config, **of_each: Any) -> tuple[LayerSpec, ...]:
    return (LayerSpec(**of_each),) * config.number("num_hidden_layers")


def _windows(config: Config, default: list[str], window: int | None) -> list[int | None]:
    """The window of each layer from `layer_types`, or from the family's own rule."""
    types = config.get("layer_types") or default
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != len(default):
        raise ModelError(f"layer_types {sorted(set(types))} for {len(types)} of {len(default)} layers is not handled")
    if window is None and "sliding_attention" in types:
        raise ModelError("layer_types has sliding_attention and there is no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


def _qwen_layers(config: Config) -> tuple[LayerSpec, ...]:
    count, first = config.number("num_hidden_layers"), config.number("max_window_layers", 28)
    window = config.get("sliding_window", 4096)
    window = window if config.flag("use_sliding_window") else None
    default = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(count)]
    rope = _rope(config)
    return tuple(LayerSpec(rope=rope, window=w) for w in _windows(config, default, window))


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
    rope = _rope(config)
    return tuple(
        LayerSpec(rope=rope, window=window, moe=moe if i not in dense and (i + 1) % step == 0 else None)
        for i, window in enumerate(windows)
    )


def _activation(name: str) -> str:
    known = ("silu", "gelu_pytorch_tanh", "gelu", "relu")
    if name not in known:
        raise ModelError(f"hidden_act {name!r} is not known", "known: " + ", ".join(known))
    return name


def _max_model_len(config: Config, layers: tuple[LayerSpec, ...]) -> int:
    """The config's context; for dynamic rope what it stretches to; for LongRoPE what its short factors serve."""
    positions = config.number("max_position_embeddings", 2048)
    ropes = [layer.rope for layer in layers if layer.rope is not None]
    if any(rope.kind == "longrope" for rope in ropes):
        return min(positions, *(rope.original for rope in ropes))
    return int(positions * max([rope.factor for rope in ropes if rope.kind == "dynamic"], default=1.0))
