"""Log-probabilities in the two shapes of the OpenAI API.

How a choice looks in a reply: as a completion or as a chat message, whole or in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tllm.server.openai.choice import ChoiceProgress, Scored
from tllm.server.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChosenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    TokenLogprob,
)
from tllm.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; a token that was ruled out


def labeller(tokenizer: Tokenizer | None, as_ids: bool) -> Callable[[int], str]:
    """How tokens are called: by their text, or `token_id:7` where asked for or where there is no tokenizer."""
    if tokenizer is None or as_ids:
        return lambda token_id: f"token_id:{token_id}"
    return tokenizer.token_label


def completion_logprobs(scored: Iterable[Scored], label: Callable[[int], str]) -> CompletionLogprobs:
    """The shape of `/v1/completions`. A chosen token's own value and its value in the top list are the same number."""
    made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for one in scored:
        made.text_offset.append(one.offset)
        made.tokens.append(label(one.token_id))
        if one.logprobs is None:
            made.token_logprobs.append(None)
            made.top_logprobs.append(None)
            continue
        own = max(one.logprobs.logprob, _LEAST)
        top: dict[str, float] = {}
        for token_id, value in one.logprobs.top:
            top.setdefault(label(token_id), own if token_id == one.token_id else max(value, _LEAST))
        top.setdefault(label(one.token_id), own)
        made.token_logprobs.append(own)
        made.top_logprobs.append(top)
    return made


def chat_logprobs(scored: Iterable[Scored], tokenizer: Tokenizer | None, label: Callable[[int], str]) -> ChatLogprobs:
    """The shape of `/v1/chat/completions`."""
    content = []
    for one in scored:
        assert one.logprobs is not None, "chat has no prompt log-probabilities"
        top = [_named(token_id, value, tokenizer, label) for token_id, value in one.logprobs.top]
        chosen = _named(one.token_id, one.logprobs.logprob, tokenizer, label)
        content.append(ChosenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _named(token_id: int, value: float, tokenizer: Tokenizer | None, label: Callable[[int], str]) -> TokenLogprob:
    data = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
    return TokenLogprob(label(token_id), max(value, _LEAST), data)


class Shape(Protocol):
    """One of the two kinds of reply."""

    prefix: str  # of reply ids
    whole_object: str
    chunk_object: str

    def whole(self, choice: ChoiceProgress) -> msgspec.Struct:
        """A finished choice."""

    def part(self, step: ChoiceProgress) -> msgspec.Struct:
        """A piece of a choice in a stream."""


@dataclass
class Shown:
    """What a request wants to see besides the text."""

    tokenizer: Tokenizer | None
    logprobs: bool = False
    labels_as_ids: bool = False
    token_ids: bool = False

    def ids(self, step: ChoiceProgress) -> list[int] | UnsetType:
        """Token ids, where asked for; without a tokenizer they are all there is."""
        return step.token_ids if self.token_ids or self.tokenizer is None else UNSET


class CompletionShape:
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._label = labeller(shown.tokenizer, shown.labels_as_ids)

    def whole(self, choice: ChoiceProgress) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self._shown.ids(choice),
        )

    part = whole

    def _logprobs(self, step: ChoiceProgress) -> CompletionLogprobs | None:
        return completion_logprobs(step.scored, self._label) if self._shown.logprobs else None


@dataclass
class ChatShape:
    """`/v1/chat/completions`."""

    shown: Shown
    prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    _begun: set[int] = field(default_factory=set)

    def whole(self, choice: ChoiceProgress) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role="assistant", content=choice.text),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self.shown.ids(choice),
        )

    def part(self, step: ChoiceProgress) -> ChatChunkChoice:
        delta = Delta()
        if step.index not in self._begun:  # the role comes with the first text, not before it
            self._begun.add(step.index)
            delta = Delta(role="assistant", content=step.text)
        elif step.text:
            delta = Delta(content=step.text)
        return ChatChunkChoice(
            index=step.index,
            delta=delta,
            logprobs=self._logprobs(step) if step.scored else None,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
            token_ids=self.shown.ids(step),
        )

    def _logprobs(self, step: ChoiceProgress) -> ChatLogprobs | None:
        if not self.shown.logprobs:
            return None
        return chat_logprobs(
            step.scored, self.shown.tokenizer, labeller(self.shown.tokenizer, self.shown.labels_as_ids)
        )
