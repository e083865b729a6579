"""Of all that a repository lists, which files are fetched, and which never."""

from __future__ import annotations

import json

import pytest

from tllm.core.errors import ConfigError, WeightsError
from tllm.hub.repository import (
    HubFile,
    Repository,
    gguf_choices,
    gguf_files_of,
    no_weights,
    safetensors_files,
    small_files,
    usable_files,
)

SHA1, SHA256 = "a" * 40, "b" * 64


def repository(*names: str) -> Repository:
    return Repository("org/name", SHA1, tuple(HubFile(name, 10, SHA256) for name in names))


def names(found: Repository) -> list[str]:
    return [file.name for file in found.files]


def index(*files: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{i}": file for i, file in enumerate(files)}}).encode()


def test_small_files_are_those_that_every_process_reads() -> None:
    listed = ("config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja")
    others = ("model.safetensors", "pytorch_model.bin", "modeling_x.py", "README.md", "onnx/config.json", "x.pt")
    modules = ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    others += ("2_Dense/pytorch_model.bin", "2_Dense/README.md")
    assert names(small_files(repository(*listed, *modules, *others))) == [*listed, *modules]
    huge = Repository("org/name", SHA1, (HubFile("config.json", 10**9, SHA1),))
    assert not small_files(huge).files


def test_weights_are_those_that_the_index_names() -> None:
    listed = repository("consolidated.safetensors", "model-1.safetensors", "model-2.safetensors", "pytorch_model.bin")
    assert names(safetensors_files(listed, index("model-2.safetensors", "model-1.safetensors"))) == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    whole = repository("consolidated.safetensors", "model.safetensors", "sub/model.safetensors")
    for beside in (None, index("consolidated.safetensors")):  # which of the two is read on a disk, and by transformers
        assert names(safetensors_files(whole, beside)) == ["model.safetensors"]
    assert names(safetensors_files(repository("other.safetensors"), None)) == ["other.safetensors"]
    for named in ("model-3.safetensors", "../../etc/passwd", "/etc/passwd"):
        with pytest.raises(WeightsError, match="which the repository lacks"):
            safetensors_files(listed, index(named))
    for broken in (b"{", b"[]", b'{"weight_map": 3}'):
        with pytest.raises(WeightsError, match="cannot be read"):
            safetensors_files(listed, broken)


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/passwd", "a/../b.json", "a//b.json", "a\\b.json", "a\0b", ".git/config", "", "x/.", "a\n"],
)
def test_a_file_that_would_leave_its_folder_is_not_even_listed(name: str) -> None:
    assert usable_files([HubFile(name, 1, SHA1), HubFile("ok.json", 1, SHA1)]) == (HubFile("ok.json", 1, SHA1),)
    assert not usable_files([HubFile("ok.json", 1, "../x"), HubFile("ok.json", -1, SHA1)])


def test_gguf_files_by_their_quantisation() -> None:
    listed = ["m-Q4_K_M.gguf", "m.Q8_0.gguf", "m-UD-Q2_K_XL.gguf", "M-bf16.gguf", "mmproj-m-f16.gguf", "plain.gguf"]
    split = ["Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"]
    choices = gguf_choices([*listed, *split])
    assert choices == {
        "BF16": ["M-bf16.gguf"],
        "Q4_K_M": ["m-Q4_K_M.gguf"],
        "UD-Q2_K_XL": ["m-UD-Q2_K_XL.gguf"],
        "Q8_0": ["m.Q8_0.gguf"],
        "plain": ["plain.gguf"],
        "Q6_K": split,
    }
    found = repository(*listed, *split)
    assert names(gguf_files_of(found, "q4_k_m")) == ["m-Q4_K_M.gguf"]
    assert names(gguf_files_of(found, "Q6_K")) == split
    assert names(gguf_files_of(repository("one.gguf"), "")) == ["one.gguf"]
    with pytest.raises(ConfigError, match=r"has no GGUF file of Q5_0") as wrong:
        gguf_files_of(found, "Q5_0")
    assert all(label in wrong.value.hint for label in choices)
    with pytest.raises(ConfigError, match="has 6 GGUF models"):
        gguf_files_of(found, "")
    with pytest.raises(WeightsError, match="has 1 of the 2 pieces"):
        gguf_files_of(repository(split[0]), "Q6_K")


def test_pickles_are_named_as_what_they_are() -> None:
    assert "only as pickle files (pytorch_model.bin)" in no_weights(repository("pytorch_model.bin")).message
    assert "neither safetensors nor GGUF" in no_weights(repository("README.md")).message
