"""What every family reads of its `config.json` in the same way: sizes, ropes, windows, activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.hf_config import Config, held_quantization
from tllm.spec.model_spec import LayerSpec, ModelSpec, RopeSpec
from tllm.spec.rope_config import rope_spec

EACH_HEAD_ITS_OWN = ("llama", "phi3", "olmo2", "olmo3", "granite", "arcee")
"""Families whose models have as many key-value heads as query heads where their config gives no number."""


def plain_spec(config: Config, layers: tuple[LayerSpec, ...], *, tied_default: bool = False, **more: Any) -> ModelSpec:
    """What every family reads the same way; `more` is what this one has of its own.

    A key that transformers would fill in differently for each family must be in the file.
    """
    head_dim = config.head_dim()
    more.setdefault("attention_scale", head_dim**-0.5)
    activation = more.pop("activation", None) or config.get("hidden_act", "silu")
    heads = config.number("num_attention_heads")
    tied, labels = config.flag("tie_word_embeddings", tied_default), num_labels(config)
    is_headless = not tied and _is_base_model(config)
    tied = tied or is_headless  # there is no other table, and nobody asks for tokens
    if not config.flag("is_causal", True):
        more["bidirectional"] = True
    return ModelSpec(
        family=config.family,
        vocab_size=config.number("vocab_size"),
        hidden_size=config.number("hidden_size"),
        intermediate_size=more.pop("intermediate_size", None) or config.number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.number("num_key_value_heads", heads if config.family in EACH_HEAD_ITS_OWN else None),
        head_dim=head_dim,
        layers=layers,
        norm_eps=config.positive("rms_norm_eps"),
        activation=_activation(activation),
        max_model_len=_max_model_len(config, layers),
        tied=tied and not labels,
        num_labels=labels,
        is_headless=is_headless,
        dtype=config.dtype(),
        # Where there is no table for logits, that of the embedding is rounded in its place.
        quantization=held_quantization({**config.raw, "tie_word_embeddings": tied or labels > 0}),
        eos_token_ids=config.token_ids("eos_token_id"),
        **more,
    )


def both_ways(spec: ModelSpec) -> ModelSpec:
    """The model where `is_causal` is false. ModelError where its layers have states.

    As in transformers, a token then sees as many keys on each side as the window says, and itself; a causal window
    counts the token among them.
    """
    if spec.delta:
        raise ModelError(
            f"is_causal=false of a {spec.family} model whose layers have a state is not handled: it holds what came "
            "before a token, and nothing of what follows",
            "take is_causal out of config.json if the model writes",
        )
    windows = (None if layer.window is None else layer.window + 1 for layer in spec.layers)
    layers = tuple(replace(layer, window=window) for layer, window in zip(spec.layers, windows, strict=True))
    return replace(spec, layers=layers)


def num_labels(config: Config) -> int:
    """Labels of the head of a `…ForSequenceClassification`, 0 for any other model.

    Where `classifier_from_token` names tokens the files are those of a causal model, and its log-probabilities score.
    """
    config.ignore("num_labels", "classifier_from_token", "is_original_qwen3_reranker")
    if not any(kind.endswith("ForSequenceClassification") for kind in _architectures(config)):
        return 0
    if config.raw.get("classifier_from_token"):
        return 0
    names = config.raw.get("id2label")
    return config.number("num_labels", len(names) if isinstance(names, dict) else 2)


def _is_base_model(config: Config) -> bool:
    """Whether the class that saved the model has no head, as `MistralModel`."""
    return any(kind.endswith("Model") for kind in _architectures(config))


def _architectures(config: Config) -> list[str]:
    kinds = config.raw.get("architectures")
    return [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]


def plain_rope(config: Config, theta: float = 1e4, part: float | None = None) -> RopeSpec:
    """The rope of all layers. `part`: what of a head is turned, where the config does not say; None: it may not say."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = config.positive("rope_theta", theta)
    given = parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", part or 1.0))
    if part is None and given != 1.0:
        raise ModelError(f"partial_rotary_factor={given} is not a key of {config.family}")
    return rope_spec(parameters, base, config.head_dim(), config.number("max_position_embeddings", 2048))


def ropes_by_type(config: Config, theta: float, local_theta: float) -> tuple[RopeSpec, RopeSpec]:
    """The rope of layers with a window, whose contexts are not scaled by `rope_scaling`, and that of the others."""
    of_near, of_far = rope_parameters_by_type(config, theta if theta == local_theta else None)
    scaling = config.get("rope_scaling") or {}
    if scaling and of_far:
        raise ModelError("both rope_parameters and rope_scaling say how rope is scaled", "take one out of config.json")
    for given in (of_near, of_far, scaling):
        if given.get("partial_rotary_factor") not in (None, 1.0):
            raise ModelError(f"partial_rotary_factor={given['partial_rotary_factor']} is not a key of {config.family}")
    head_dim, positions = config.head_dim(), config.number("max_position_embeddings", 2048)
    near = rope_spec(of_near, local_theta, head_dim, positions)
    return near, rope_spec(of_far or scaling, config.positive("rope_theta", theta), head_dim, positions)


def rope_parameters_by_type(config: Config, theta: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `rope_parameters` says of layers with a window and of the others, in families where it says it of each.

    A table for all layers may say no more than that their ropes are of this `theta`, which they have without it:
    transformers reads nothing else of such a table.
    """
    parameters, kinds = config.get("rope_parameters") or {}, ("sliding_attention", "full_attention")
    for key, value in parameters.items():
        if theta is not None and (key, value) in (("rope_type", "default"), ("rope_theta", theta)):
            continue
        if key not in kinds or not isinstance(value, dict | None):
            raise ModelError(
                f"rope_parameters of a {config.family} model has {key!r} ({str(value)[:60]}), which is not handled",
                "it has a table for each kind of layers: " + ", ".join(kinds),
            )
    near, far = (parameters.get(kind) or {} for kind in kinds)
    return near, far


def same_layers(config: Config, **of_each: Any) -> tuple[LayerSpec, ...]:
    return (LayerSpec(**of_each),) * config.number("num_hidden_layers")


def all_but_each(count: int, every: int, other: str = "sliding_attention") -> list[str]:
    """Kinds of layers as `layer_types` has them: each `every`-th sees all, and the others are of the other kind."""
    return [other if (number + 1) % every else "full_attention" for number in range(count)]


def layer_windows(config: Config, default: list[str], window: int | None) -> list[int | None]:
    """The window of each layer from `layer_types`, or from the family's own rule."""
    types = config.get("layer_types") or default
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != len(default):
        raise ModelError(f"layer_types {sorted(set(types))} for {len(types)} of {len(default)} layers is not handled")
    if window is None and "sliding_attention" in types:
        raise ModelError("layer_types has sliding_attention and there is no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


def _activation(name: str) -> str:
    known = ("silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2")
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
