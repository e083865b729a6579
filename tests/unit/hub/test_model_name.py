"""Names of models: what is one, and that none leads out of the folder that it is looked up in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import ConfigError
from tllm.hub.model_name import ModelName, is_revision, meant, parse_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", ModelName("hub", "org/name")),
        ("Org-1/name_2.5-it", ModelName("hub", "Org-1/name_2.5-it")),
        ("org/name@v1.0", ModelName("hub", "org/name", "v1.0")),
        (f"org/name@{COMMIT}", ModelName("hub", "org/name", COMMIT)),
        ("org/name@refs/pr/4", ModelName("hub", "org/name", "refs/pr/4")),
        ("org/name:Q4_K_M", ModelName("hub", "org/name", "", "Q4_K_M")),
        ("org/name@main:Q8_0", ModelName("hub", "org/name", "main", "Q8_0")),
        ("ollama:qwen3", ModelName("ollama", "qwen3")),
        ("ollama:qwen3:0.6b", ModelName("ollama", "qwen3", "", "0.6b")),
        ("ollama:hf.co/org/name:Q4_K_M", ModelName("ollama", "hf.co/org/name", "", "Q4_K_M")),
        ("lmstudio:org/name:Q8_0", ModelName("lmstudio", "org/name", "", "Q8_0")),
    ],
)
def test_a_name_is_read_and_written(text: str, name: ModelName) -> None:
    assert parse_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("name", "a/b/c", "/org/name", "./org/name", "../name", "org/..", "org/../name", "~/name", "org/name/"),
        *("org//name", "org/name.gguf", "org/name@../x", "org/na me", "org/näme", "org/name:", "org/name@", ""),
        *("ollama:../x", "org/.x", "ollama:a/../b", "lmstudio:name", "hub:org/name", "org/" + "n" * 97),
        *("org/name\n", "-o/name"),
    ],
)
def test_what_is_no_name(text: str) -> None:
    assert parse_name(text) is None


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("https://huggingface.co/org/name", "give org/name, the model's name"),
        ("https://huggingface.co/org/name/tree/main", "give org/name, the model's name"),
        ("hf.co/org/name", "give org/name, the model's name"),
        ("hf://org/name", "give org/name, the model's name"),
        ("llama3:8b", "ollama:llama3:8b is what ollama has pulled"),
        ("./model", "give a folder with a config.json"),
    ],
)
def test_what_was_meant(text: str, hint: str) -> None:
    assert parse_name(text) is None
    assert hint in meant(text)


@given(st.text(max_size=40))
def test_no_name_leads_out_of_a_folder(text: str) -> None:
    for shape in (text, f"org/{text}", f"org/name@{text}", f"org/name:{text}", f"ollama:{text}"):
        try:
            name = parse_name(shape)
        except ConfigError:  # a name, and what stands behind it is no revision
            continue
        if name is not None:
            parts = [*name.repo.split("/"), *name.revision.split("/"), name.tag]
            assert ".." not in parts and "." not in parts
            assert not name.repo.startswith("/") and "\\" not in shape and "\0" not in shape


def test_a_revision_is_asked_for_once() -> None:
    assert parse_name("org/name", "v2") == parse_name("org/name@v2", "v2") == ModelName("hub", "org/name", "v2")
    with pytest.raises(ConfigError, match=r"names the revision v1, and --revision is v2"):
        parse_name("org/name@v1", "v2")
    with pytest.raises(ConfigError, match="has no revision v2"):
        parse_name("ollama:qwen3", "v2")
    with pytest.raises(ConfigError, match="is not a branch, tag or commit"):
        parse_name("org/name", "../../etc")


@pytest.mark.parametrize("text", ["../x", "a/../b", "/etc", "a//b", "", "a b", "a\nb", ".git"])
def test_what_is_no_revision(text: str) -> None:
    assert not is_revision(text)
