"""The nested `text_config` of multimodal models: what is handed down, what the whole decides, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.spec.test_families import LLAMA
from tllm.core.errors import ModelError
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config, text_config

TEXT: dict[str, Any] = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
WHOLE: dict[str, Any] = dict(
    model_type="mistral3", text_config=TEXT, vision_config=dict(hidden_size=3), image_token_index=10
)


def test_the_whole_hands_down_what_the_text_part_lacks() -> None:
    whole = {**WHOLE, "torch_dtype": "bfloat16", "eos_token_id": [1, 106], "tie_word_embeddings": True}
    spec = spec_from_config({**whole, "text_config": {**TEXT, "eos_token_id": 1, "tie_word_embeddings": False}})
    assert (spec.dtype, spec.eos_token_ids, spec.tied, spec.family) == ("bfloat16", (1, 106), True, "mistral")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(text_config=None), "no text_config"),
        (dict(some_new_key=3), "'some_new_key'"),
        (dict(text_config={**TEXT, "model_type": "mamba"}), "'mamba'"),
        (dict(quantization_config=dict(bits=4)), "quant_method"),
        (dict(model_type="paligemma"), "'paligemma'"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        spec_from_config({**WHOLE, **change})


def test_a_text_model_is_returned_as_it_is() -> None:
    assert text_config(LLAMA) is LLAMA


def test_files_that_other_machines_wrote(tmp_path: Path) -> None:
    """With a byte order mark and Windows' line ends they are read; what is no table is said to be none."""
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA, indent=1).replace("\n", "\r\n").encode())
    generation.write_bytes(b'\xef\xbb\xbf{"eos_token_id": [3, 4]}')
    assert spec_from_config(read_config(tmp_path)).eos_token_ids == (3, 4)
    for file in (generation, config):
        for damage in (b"", b"[3]", b"null", b"[" * 9999, b'{"a": \xff}'):
            file.write_bytes(damage)
            with pytest.raises(ModelError, match=file.name):
                read_config(tmp_path)


def test_a_folder_of_an_adapter_is_told_from_one_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is a LoRA adapter") as refused:
        read_config(tmp_path)
    assert f"--adapter {tmp_path}" in refused.value.hint


def test_a_file_that_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (weights := tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="neither a model's folder nor a GGUF file") as refused:
        read_config(weights)
    assert refused.value.hint == f"give its folder, {tmp_path}"
    (blob := tmp_path / "sha256-0123").write_bytes(b"GGUF" + bytes(99))  # as ollama keeps it
    with pytest.raises(ModelError, match=r"the GGUF file .*sha256-0123 does not end with \.gguf") as refused:
        read_config(blob)
    assert f"ln -s {blob} model.gguf" in refused.value.hint and "ollama:NAME" in refused.value.hint
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(ModelError, match="is a pointer of Git LFS") as refused:
        read_config(tmp_path)
    assert "git lfs pull" in refused.value.hint
