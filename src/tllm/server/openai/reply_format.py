"""Replies of the OpenAI API: their types, and how a choice looks as a completion or a chat message, whole or in chunks.

Fields are in the order in which OpenAI's own server writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tllm.server.openai.choice import ChoiceProgress, ScoredToken
from tllm.server.reply.events import (
    ArgumentsPiece,
    ReasoningPiece,
    ReplyEvent,
    ReplyFinish,
    TextPiece,
    ToolCallBegin,
    merged,
)
from tllm.spec.request import TokenLogprobs
from tllm.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no infinity, which is the logarithm for a token that was ruled out


class PromptTokensDetails(msgspec.Struct):
    """What became of the prompts' tokens."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """What the replies' tokens were for."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens in and out. A prompt counts once, however many choices continue it."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage(prompt: int, completion: int, cached: int, reasoning: int = 0) -> Usage:
    """A `Usage` whose sum is right."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(reasoning) if reasoning else UNSET,
    )


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


class RankedLogprob(msgspec.Struct):
    """One token at a place of a prompt; `rank` is 1 for the likeliest of all."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""For each token of a prompt, it and the likeliest ones at its place by their ids; the first token has none."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text; also a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunction(msgspec.Struct):
    """What a call calls. `arguments` are JSON text; in a stream, a part of it, and the name comes once."""

    name: str | UnsetType
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One call; in a stream a part of one, which `index` names, and `id` and `type` come once."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the model says. `content` is null where a reply has calls and no text."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


def labeller(tokenizer: Tokenizer | None, return_tokens_as_token_ids: bool) -> Callable[[int], str]:
    """How tokens are called: by their text, or `token_id:7` where asked for or where there is no tokenizer."""
    if tokenizer is None or return_tokens_as_token_ids:
        return lambda token_id: f"token_id:{token_id}"
    return tokenizer.token_label


def completion_logprobs(scored: Iterable[ScoredToken], label: Callable[[int], str]) -> CompletionLogprobs:
    """The shape of `/v1/completions`. A chosen token's own value and its value in the top list are the same number."""
    logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in scored:
        logprobs.text_offset.append(token.offset)
        logprobs.tokens.append(label(token.token_id))
        if token.logprobs is None:
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
            continue
        own = max(token.logprobs.logprob, _LEAST_LOGPROB)
        top: dict[str, float] = {}
        for token_id, value in token.logprobs.top:
            top.setdefault(label(token_id), own if token_id == token.token_id else max(value, _LEAST_LOGPROB))
        top.setdefault(label(token.token_id), own)
        logprobs.token_logprobs.append(own)
        logprobs.top_logprobs.append(top)
    return logprobs


def prompt_logprobs(values: Iterable[TokenLogprobs | None], top: int, label: Callable[[int], str]) -> PromptLogprobs:
    """vLLM's shape: of each prompt token and of so many likeliest ones."""
    places: PromptLogprobs = []
    for of_token in values:
        if of_token is None:
            places.append(None)
            continue
        named = [(of_token.token_id, of_token.logprob, of_token.rank)]
        named += ((token_id, value, rank) for rank, (token_id, value) in enumerate(of_token.top[:top], 1))
        place: dict[str, RankedLogprob] = {}
        for token_id, value, rank in named:
            place.setdefault(str(token_id), RankedLogprob(max(value, _LEAST_LOGPROB), rank, label(token_id)))
        places.append(place)
    return places


def chat_logprobs(
    scored: Iterable[ScoredToken], tokenizer: Tokenizer | None, label: Callable[[int], str]
) -> ChatLogprobs:
    """The shape of `/v1/chat/completions`."""
    content = []
    for token in scored:
        assert token.logprobs is not None, "chat has no prompt log-probabilities"
        top = [_named(token_id, value, tokenizer, label) for token_id, value in token.logprobs.top]
        chosen = _named(token.token_id, token.logprobs.logprob, tokenizer, label)
        content.append(ChosenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _named(token_id: int, value: float, tokenizer: Tokenizer | None, label: Callable[[int], str]) -> TokenLogprob:
    data = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
    return TokenLogprob(label(token_id), max(value, _LEAST_LOGPROB), data)


class ReplyFormat(Protocol):
    """One of the two kinds of reply."""

    id_prefix: str  # of reply ids
    object_name: str
    chunk_object_name: str
    reads_events: bool  # and not the text as it is
    fields: ReplyFields

    def choice(self, choice: ChoiceProgress) -> msgspec.Struct:
        """A finished choice."""

    def chunk_choice(self, progress: ChoiceProgress) -> msgspec.Struct:
        """A piece of a choice in a stream."""


@dataclass
class ReplyFields:
    """What a request wants to see besides the text."""

    tokenizer: Tokenizer | None
    logprobs: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    prompt_logprobs: int | None = None

    @property
    def label(self) -> Callable[[int], str]:
        """How tokens are called."""
        return labeller(self.tokenizer, self.return_tokens_as_token_ids)

    def of_prompt(self, progress: ChoiceProgress) -> PromptLogprobs | UnsetType:
        """Log-probabilities of the prompt's tokens, where asked for."""
        if self.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(progress.prompt_logprobs, self.prompt_logprobs, self.label)

    def ids(self, progress: ChoiceProgress) -> list[int] | UnsetType:
        """Token ids, where asked for; without a tokenizer they are all there is."""
        return progress.token_ids if self.return_token_ids or self.tokenizer is None else UNSET


class CompletionFormat:
    """`/v1/completions`."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"
    reads_events = False

    def __init__(self, fields: ReplyFields) -> None:
        self.fields = fields
        self._label = fields.label

    def choice(self, choice: ChoiceProgress) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self.fields.ids(choice),
            prompt_logprobs=self.fields.of_prompt(choice),
        )

    chunk_choice = choice

    def _logprobs(self, progress: ChoiceProgress) -> CompletionLogprobs | None:
        return completion_logprobs(progress.scored, self._label) if self.fields.logprobs else None


@dataclass
class ChatFormat:
    """`/v1/chat/completions`, from the events of a reply."""

    fields: ReplyFields
    id_prefix: str = "chatcmpl"
    object_name: str = "chat.completion"
    chunk_object_name: str = "chat.completion.chunk"
    reads_events: bool = True
    _begun: set[int] = field(default_factory=set)

    def choice(self, choice: ChoiceProgress) -> ChatChoice:
        reply = merged(choice.events)
        assert reply.finish is not None, "a whole choice has ended"
        calls = [
            ToolCall(id=call.id, type="function", function=CalledFunction(call.name, call.arguments))
            for call in reply.calls
        ]
        message = ChatMessage(
            role="assistant",
            content=reply.text or (None if calls else ""),
            reasoning_content=reply.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice),
            finish_reason=reply.finish.reason,
            stop_reason=choice.stop_reason,
            token_ids=self.fields.ids(choice),
        )

    def chunk_choice(self, progress: ChoiceProgress) -> ChatChunkChoice:
        delta, finish_reason = _delta(progress.events)
        if progress.index not in self._begun:  # the role comes with the first text, not before it
            self._begun.add(progress.index)
            delta.role = "assistant"
            if delta.reasoning_content is UNSET and delta.tool_calls is UNSET and delta.content is UNSET:
                delta.content = ""
        return ChatChunkChoice(
            index=progress.index,
            delta=delta,
            logprobs=self._logprobs(progress) if progress.scored else None,
            finish_reason=finish_reason,
            stop_reason=progress.stop_reason,
            token_ids=self.fields.ids(progress),
        )

    def _logprobs(self, progress: ChoiceProgress) -> ChatLogprobs | None:
        if not self.fields.logprobs:
            return None
        return chat_logprobs(progress.scored, self.fields.tokenizer, self.fields.label)


def _delta(events: Iterable[ReplyEvent]) -> tuple[Delta, str | None]:
    """What events add to a message, and the reason for its end where it has come."""
    text, reasoning, reason = "", "", None
    calls = list[ToolCall]()
    for event in events:
        if isinstance(event, TextPiece):
            text += event.text
        elif isinstance(event, ReasoningPiece):
            reasoning += event.text
        elif isinstance(event, ToolCallBegin):
            begun = CalledFunction(event.name, "")
            calls.append(ToolCall(index=event.index, id=event.id, type="function", function=begun))
        elif isinstance(event, ArgumentsPiece):
            if not calls or calls[-1].index != event.index:
                calls.append(ToolCall(index=event.index, function=CalledFunction(UNSET, "")))
            calls[-1].function.arguments += event.text
        elif isinstance(event, ReplyFinish):
            reason = event.reason
    return Delta(content=text or UNSET, reasoning_content=reasoning or UNSET, tool_calls=calls or UNSET), reason
