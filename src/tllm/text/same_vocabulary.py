"""Whether two models have the same tokens, so that one can draft for the other, teach it, or sample for it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from tllm.core.errors import ConfigError
from tllm.text.tokenizer import Tokenizer

MOST_PADDING = 0.01
"""Of a vocabulary, at its end: tokens that only one of the two has, such as those that fill up an embedding's rows."""

HINTS = {
    "draft model": "a draft model must have the tokens of the model that it drafts for: take a smaller one of the same "
    "series",
    "teacher": "a teacher must have the tokens of the model that it teaches: take a larger one of the same series",
}

Other = Literal["draft model", "teacher"]


def check_same_vocabulary(
    target: Path, draft: Path, target_size: int, draft_size: int, other: Other = "draft model"
) -> None:
    """ConfigError unless every id is the same token in the tokenizers of both folders.

    `target_size` and `draft_size` are the rows of the models' embeddings, which may differ by rows of no token. Two
    models without any tokenizer must have as many.
    """
    ours, theirs = Tokenizer.from_folder(target), Tokenizer.from_folder(draft)
    if ours is None and theirs is None:
        if target_size != draft_size:
            raise ConfigError(
                f"the {other} {draft} has {draft_size} tokens and the model {target} has {target_size}, and "
                "neither has a tokenizer that says which of them are the same",
                HINTS[other],
            )
        return
    if ours is None or theirs is None:
        lacks, has = (target, draft) if ours is None else (draft, target)
        raise ConfigError(
            f"{lacks} has no tokenizer to compare with that of {has}",
            "put its tokenizer.json into the folder: token ids must mean the same in both models",
        )
    _compare(ours, theirs, target, draft, other)


def _compare(ours: Tokenizer, theirs: Tokenizer, target: Path, draft: Path, other: Other) -> None:
    here, there = _tokens(ours), _tokens(theirs)
    common = min(len(here), len(there))
    others = [token_id for token_id in sorted({*here, *there})[:common] if here.get(token_id) != there.get(token_id)]
    if others:
        first = others[0]
        raise ConfigError(
            f"{len(others)} of {common} tokens of the {other} {draft} are not those of {target} (they have "
            f"{len(there)} and {len(here)}): token {first} is {there.get(first)!r} there and {here.get(first)!r} here",
            HINTS[other],
        )
    if abs(len(here) - len(there)) > MOST_PADDING * common:
        raise ConfigError(
            f"the {other} {draft} has {len(there)} tokens and the model {target} has {len(here)}: more than "
            f"padding, of which {100 * MOST_PADDING:g} % is taken",
            HINTS[other],
        )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.inner.get_vocab(with_added_tokens=True).items()}


def vocabulary_digest(folder: Path) -> str:
    """The tokens of a folder's tokenizer and their ids, as 16 hexadecimal digits; "" without a tokenizer."""
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        return ""
    return hashlib.sha256(msgspec.msgpack.encode(sorted(_tokens(tokenizer).items()))).hexdigest()[:16]
