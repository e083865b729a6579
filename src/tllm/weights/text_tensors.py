"""The tensors of a text model, wherever a checkpoint keeps them: multimodal ones put a prefix before their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tllm.core.errors import WeightsError

T = TypeVar("T")

PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""What the text part's names begin with in multimodal checkpoints -> what they begin with in a text model's."""

OTHER_PARTS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower", "mtp")
"""Encoders of images and sound with their projectors, and heads that predict several tokens: none of them is read."""


def text_tensors(entries: Mapping[str, T]) -> dict[str, T]:
    """The text model's tensors under the names that a text model's checkpoint gives them."""
    found: dict[str, T] = {}
    for name, entry in entries.items():
        if name.removeprefix("model.").partition(".")[0] in OTHER_PARTS:
            continue
        old = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        plain = PREFIXES.get(old, "") + name[len(old) :]
        if plain in found:
            raise WeightsError(f"the weight files have {plain!r} twice, once as {name!r}", "take one of them out")
        found[plain] = entry
    return found
