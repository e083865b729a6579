"""What a user says of drafts, in vLLM's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models.families import save_model
from tllm.core.errors import ConfigError
from tllm.spec.speculative_config import DEFAULT_DRAFT_TOKENS, SpeculativeConfig, read_speculative_config


def test_json_and_dicts_are_read() -> None:
    model = SpeculativeConfig(model="small", num_speculative_tokens=3, quantization="int4")
    text = '{"model": "small", "num_speculative_tokens": 3, "quantization": "int4"}'
    assert read_speculative_config(text) == model == read_speculative_config(model)
    assert model.folder == Path("small")
    looked_up = read_speculative_config({"method": "ngram"})
    assert (looked_up.num_speculative_tokens, looked_up.folder) == (DEFAULT_DRAFT_TOKENS, None)
    assert looked_up.draft_spec() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "Expected `object`, got `array`"),
        ({"num_speculative_tokens": 0}, "is 0, at least 1"),
        ({"num_speculative_tokens": "5"}, "Expected `int`, got `str`"),
        ({"method": "medusa", "model": "small"}, "Invalid enum value 'medusa'"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "model": "small"}, "takes no model"),
        ({"quantization": "int4"}, "quantization is there and no model"),
        ({"model": "small", "node": "b"}, "unknown field `node`"),
    ],
)
def test_what_cannot_be_is_refused(given: str | dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_speculative_config(given)
    assert caught.value.hint


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder or a GGUF file"):
        SpeculativeConfig(model=str(tmp_path / "nowhere")).draft_spec()


def test_a_model_whose_drafts_cannot_be_taken_back_is_refused(tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path)
    with pytest.raises(ConfigError, match="has layers with a state in place of keys and values"):
        SpeculativeConfig(model=str(tmp_path)).draft_spec()
