"""How a choice looks in a reply: as a completion or as a chat message, whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tllm.server.choice import Advance
from tllm.server.logprobs import chat_logprobs, completion_logprobs, labeller
from tllm.server.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
)
from tllm.text.tokenizer import Tokenizer


class Shape(Protocol):
    """One of the two kinds of reply."""

    prefix: str  # of reply ids
    whole_object: str
    chunk_object: str

    def whole(self, choice: Advance) -> msgspec.Struct:
        """A finished choice."""

    def part(self, step: Advance) -> msgspec.Struct:
        """A piece of a choice in a stream."""


@dataclass
class Shown:
    """What a request wants to see besides the text."""

    tokenizer: Tokenizer | None
    logprobs: bool = False
    labels_as_ids: bool = False
    token_ids: bool = False

    def ids(self, step: Advance) -> list[int] | UnsetType:
        """Token ids, where asked for; without a tokenizer they are all there is."""
        return step.token_ids if self.token_ids or self.tokenizer is None else UNSET


class CompletionShape:
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._label = labeller(shown.tokenizer, shown.labels_as_ids)

    def whole(self, choice: Advance) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self._shown.ids(choice),
        )

    part = whole

    def _logprobs(self, step: Advance) -> CompletionLogprobs | None:
        return completion_logprobs(step.scored, self._label) if self._shown.logprobs else None


@dataclass
class ChatShape:
    """`/v1/chat/completions`."""

    shown: Shown
    prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    _begun: set[int] = field(default_factory=set)

    def whole(self, choice: Advance) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role="assistant", content=choice.text),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self.shown.ids(choice),
        )

    def part(self, step: Advance) -> ChatChunkChoice:
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

    def _logprobs(self, step: Advance) -> ChatLogprobs | None:
        if not self.shown.logprobs:
            return None
        return chat_logprobs(
            step.scored, self.shown.tokenizer, labeller(self.shown.tokenizer, self.shown.labels_as_ids)
        )
