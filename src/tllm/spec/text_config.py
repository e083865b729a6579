"""The text part of a multimodal checkpoint: its `text_config` as the `config.json` of a model of its own."""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ModelError

GEMMA3 = dict(
    model_type="gemma3_text",
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
)
"""Published files give only what differs from this."""

MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA3,
    "mistral3": dict(model_type="mistral"),
    "qwen3_vl": dict(model_type="qwen3_vl_text"),
}
"""`model_type` of a multimodal model -> what its `text_config` holds where a file leaves it out."""

OTHER_PARTS = frozenset({
    "architectures", "model_type", "text_config", "vision_config", "audio_config",
    "image_token_id", "image_token_index", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "vision_feature_layer",
})  # fmt: skip
"""Keys of the whole that say nothing of its text part."""

WHOLE_DECIDES = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Keys that the whole and its text part may both have, and that count as the whole has them."""


def is_multimodal(raw: dict[str, Any]) -> bool:
    return raw.get("model_type") in MULTIMODAL


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part alone; that of a text model is returned as it is.

    Any other key of the whole is handed down, so that the text part's family refuses what it does not know.
    """
    if not is_multimodal(raw):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"config.json of a {raw['model_type']} model has no text_config", "copy the file again")
    whole = {key: value for key, value in raw.items() if key not in OTHER_PARTS and value is not None}
    decided = {key: whole[key] for key in WHOLE_DECIDES if key in whole}
    return {**MULTIMODAL[raw["model_type"]], **whole, **text, **decided}
