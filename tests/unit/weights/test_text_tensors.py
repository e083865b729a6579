"""Names of a text model's tensors, wherever they lie."""

from __future__ import annotations

import pytest

from tllm.core.errors import WeightsError
from tllm.weights.safetensors_index import text_tensors

PLAIN = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]


def with_prefix(names: list[str], prefix: str) -> list[str]:
    return [name.replace("model.", prefix, 1) for name in names]


@pytest.mark.parametrize(
    "names",
    [
        PLAIN,
        with_prefix(PLAIN, "model.language_model."),
        [f"language_model.{name}" for name in PLAIN],
        [*PLAIN, "mtp.layers.0.mlp.up_proj.weight", "model.visual.blocks.0.norm1.weight", "visual.patch_embed.bias"],
        [*PLAIN, "vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight", "model.audio_tower.x"],
    ],
)
def test_every_place_gives_the_same_names(names: list[str]) -> None:
    assert list(text_tensors(dict.fromkeys(names, 1))) == PLAIN


def test_a_tensor_that_is_there_twice_is_an_error() -> None:
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' twice"):
        text_tensors(dict.fromkeys(["model.norm.weight", "language_model.model.norm.weight"], 1))


def test_an_unknown_name_stays() -> None:
    assert list(text_tensors({"model.layers.0.visualised.weight": 1})) == ["model.layers.0.visualised.weight"]
