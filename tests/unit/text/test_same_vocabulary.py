"""A draft model's tokens must be those of its target, but for padding at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from tests.unit.text import kits
from tllm.core.errors import ConfigError
from tllm.text.same_vocabulary import check_same_vocabulary


def folders(root: Path, ours: tokenizers.Tokenizer | None, theirs: tokenizers.Tokenizer | None) -> tuple[Path, Path]:
    pair = (root / "target", root / "draft")
    for folder, inner in zip(pair, (ours, theirs), strict=True):
        folder.mkdir()
        if inner is not None:
            kits.save(folder, inner, {})
    return pair


def changed(tokens: dict[str, str], more: int = 0) -> tokenizers.Tokenizer:
    """The byte-level tokenizer with some of its tokens called otherwise, and more at its end."""
    raw = json.loads(kits.byte_level().to_str())
    vocabulary = {tokens.get(token, token): token_id for token, token_id in raw["model"]["vocab"].items()}
    for token in raw["added_tokens"]:
        token["content"] = tokens.get(token["content"], token["content"])
    raw["post_processor"] = None
    size = len(vocabulary)
    raw["model"]["vocab"] = vocabulary | {f"[PAD{size + i}]": size + i for i in range(more)}
    return tokenizers.Tokenizer.from_str(json.dumps(raw))


def test_the_same_tokens_with_some_padding_are_taken(tmp_path: Path) -> None:
    for number, (ours, theirs) in enumerate([(changed({}), changed({})), (changed({}), changed({}, more=3))]):
        for root, pair in ((f"{number}", (ours, theirs)), (f"{number} turned", (theirs, ours))):
            (tmp_path / root).mkdir()
            check_same_vocabulary(*folders(tmp_path / root, *pair), 420, 512)


def test_more_than_padding_is_refused_with_both_sizes(tmp_path: Path) -> None:
    size = kits.byte_level().get_vocab_size()
    pair = folders(tmp_path, changed({}), changed({}, more=40))
    with pytest.raises(ConfigError, match=f"has {size + 40} tokens and the model .* has {size}: more than padding"):
        check_same_vocabulary(*pair, 512, 512)


def test_other_tokens_are_refused_and_the_first_is_named(tmp_path: Path) -> None:
    size, whole = kits.byte_level().get_vocab_size(), {"<|user|>": "<|someone|>"}
    token_id = kits.byte_level().token_to_id("<|user|>")
    pair = folders(tmp_path, kits.byte_level(), changed(whole))
    with pytest.raises(ConfigError, match=f"1 of {size} tokens .*{size} and {size}.* token {token_id} is '<.someone"):
        check_same_vocabulary(*pair, 512, 512)


def test_without_tokenizers_the_sizes_must_be_equal(tmp_path: Path) -> None:
    pair = folders(tmp_path, None, None)
    check_same_vocabulary(*pair, 101, 101)
    with pytest.raises(ConfigError, match=r"has 90 tokens and the model .* has 101, and neither"):
        check_same_vocabulary(*pair, 101, 90)


def test_one_tokenizer_alone_cannot_be_compared(tmp_path: Path) -> None:
    pair = folders(tmp_path, kits.byte_level(), None)
    with pytest.raises(ConfigError, match="draft has no tokenizer to compare with that of"):
        check_same_vocabulary(*pair, 512, 512)
