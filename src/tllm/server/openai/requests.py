"""Requests of the OpenAI API (and vLLM's additions) as types: every field that real clients send, with its range.

A field that is not here is ignored, as OpenAI's and vLLM's servers do. One that would change the reply and is not
done here is `Refused`: any value that asks for something is an error that names the field.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tllm.core.errors import RequestError

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Count = Annotated[int, Meta(ge=1, le=16)]
TokenCount = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Top = Annotated[int, Meta(ge=0, le=20)]
Refused = Any
STOPS, STOP_LENGTH, BIASES = 16, 256, 1024


class StreamOptions(msgspec.Struct):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    min_tokens: TokenCount | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Refused = None
    structured_outputs: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    logits_processors: Refused = None
    allowed_token_ids: Refused = None
    bad_words: Refused = None
    truncate_prompt_tokens: Refused = None
    use_beam_search: Refused = None
    prompt_logprobs: Refused = None

    def check(self) -> None:
        """What types alone do not say."""
        if isinstance(self.response_format, dict) and self.response_format.get("type") == "text":
            self.response_format = None
        _refuse(self, SamplingFields)
        if any(not stop or len(stop) > STOP_LENGTH for stop in self.stops) or len(self.stops) > STOPS:
            raise RequestError(f"stop takes up to {STOPS} strings of 1 to {STOP_LENGTH} characters", param="stop")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for a stream", "add stream: true", "stream_options")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, none to many."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`. A prompt is a text, ids, or a batch of either."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None
    suffix: Refused = None
    prompt_embeds: Refused = None

    def check(self) -> None:
        super().check()
        _refuse(self, CompletionRequest)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}: choosing among more is not done here",
                "leave best_of out",
                "best_of",
            )


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class RequestMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn of a conversation, as the chat template sees it."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[RequestMessage], Meta(min_length=1, max_length=4096)]
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: str | None = None
    tools: Refused = None
    functions: Refused = None
    chat_template: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None

    def check(self) -> None:
        super().check()
        _refuse(self, ChatRequest)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise RequestError(message, param="continue_final_message")
        overridden = {"messages", "tools", "add_generation_prompt", "continue_final_message"} & set(
            self.chat_template_kwargs or {}
        )
        if overridden:
            message = f"chat_template_kwargs may not set {sorted(overridden)[0]}"
            raise RequestError(message, "use the field of that name", "chat_template_kwargs")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[RequestMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]


_REFUSED_IN: dict[type, tuple[str, ...]] = {}


def _refuse(request: SamplingFields, kind: type) -> None:
    """An error for the first refused field of `kind` that asks for something."""
    if kind not in _REFUSED_IN:
        _REFUSED_IN[kind] = tuple(name for name, mark in kind.__annotations__.items() if mark == "Refused")
    for name in _REFUSED_IN[kind]:
        if getattr(request, name) not in (None, False, "", [], {}):
            raise RequestError(f"{name} is not supported by this server", f"leave {name} out", name)
