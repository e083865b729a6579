"""What a GGUF file's metadata says of the vocabulary: texts of tokens, their kinds, and the ids that end a reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tllm.core.errors import WeightsError
from tllm.core.gguf_header import TEXT, GgufArray, Value

TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens, as `token_type` counts them."""

Role = Literal["bos", "eos", "eot", "eom", "unknown", "padding"]
"""What files name a token for."""

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|endoftext|>",
    "<|eom_id|>", "<|end_of_text|>", "<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|flush|>", "<|calls|>",
})  # fmt: skip
"""Tokens that end a reply or a turn where they are not plain text. Files name one such id or two, and chat models have
more."""


def texts(metadata: Mapping[str, Value], key: str) -> list[str]:
    """A list of texts, empty where the file has none. WeightsError where it is a list of something else."""
    value = metadata.get(key)
    if value is None:
        return []
    if not isinstance(value, GgufArray) or value.kind != TEXT:
        raise WeightsError(f"{key} is no list of texts", "convert the model again with today's llama.cpp")
    return [str(item) for item in value.values()]


def numbers(metadata: Mapping[str, Value], key: str) -> list[float]:
    """A list of numbers, empty where the file has none."""
    value = metadata.get(key)
    if value is None:
        return []
    if not isinstance(value, GgufArray) or value.kind == TEXT:
        raise WeightsError(f"{key} is no list of numbers", "convert the model again with today's llama.cpp")
    return [float(item) for item in value.values()]


def token_id(metadata: Mapping[str, Value], role: Role, count: int) -> int | None:
    """The id of the token with a role, of a vocabulary of so many."""
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WeightsError(f"{key} is {value!r} and an id is a whole number", "convert the model again")
    # Files say 2**32 - 1, or a number past the vocabulary, for none.
    return value if value < count else None


def stop_ids(metadata: Mapping[str, Value]) -> tuple[int, ...]:
    """The ids that end a reply: those that the file names, and control tokens that always do."""
    tokens, kinds = texts(metadata, TOKENS), numbers(metadata, TYPES)
    roles: tuple[Role, ...] = ("eos", "eot", "eom")
    named = [token_id(metadata, role, len(tokens)) for role in roles]
    marked = [i for i, kind in enumerate(kinds[: len(tokens)]) if kind in (CONTROL, USER_DEFINED)]
    ends = {tokens[i]: i for i in marked if tokens[i] in ENDS}
    if "<|return|>" in ends and "<|call|>" in ends:
        # There a reply has several messages, and this one only ends a message.
        ends.pop("<|end|>", None)
    return tuple(dict.fromkeys(i for i in (*named, *ends.values()) if i is not None))
