"""Replies of the OpenAI API as types, in the order OpenAI's own server writes them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Usage(msgspec.Struct, kw_only=True):
    """Tokens in and out. A prompt counts once, however many choices continue it."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


def usage(prompt: int, completion: int) -> Usage:
    """A `Usage` whose sum is right."""
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry a token; a first prompt token has no probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TokenLogprob(msgspec.Struct):
    """One likely token at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat choice."""

    content: list[ChosenLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text; also a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the model says."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one message."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ApiReply(msgspec.Struct, kw_only=True):
    """A whole reply or one chunk of a stream, of either kind."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
