"""Requests of the OpenAI API (and vLLM's additions) as types: every field that real clients send, with its range.

A field that is not here is ignored, as OpenAI's and vLLM's servers do. One that would change the reply and is not
done here is `Refused`: any value that asks for something is an error that names the field. `SamplingFields` also turns
its values into the engine's `SamplingParams`, which keep their names from there on.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from tllm.core.errors import RequestError
from tllm.server.http.errors import context_exceeded, prompt_too_long
from tllm.server.http.settings import RequestLimits
from tllm.server.openai.tools import Tool, ToolChoice
from tllm.spec.request import Grammar, SamplingParams
from tllm.text.generation_config import GenerationConfig, sampling_values

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Count = Annotated[int, Meta(ge=1)]
TokenCount = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Top = Annotated[int, Meta(ge=0, le=20)]
Refused = Any
Priority = Annotated[int, Meta(gt=-(1 << 31), lt=1 << 31)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
_SEEDS = 1 << 63


class StreamOptions(msgspec.Struct):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common.

    More tokens than the context leaves are an error; not so where `takes_what_is_left`, as programs of other interfaces
    ask for what the largest models give. A reply that the context ends says so.
    """

    takes_what_is_left: ClassVar[bool] = False
    default_max_tokens: ClassVar[int | None] = None  # for who does not say how many; None: all that the context leaves
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
    stop_token_ids: list[TokenId] | None = None
    min_tokens: TokenCount | None = None
    prompt_logprobs: Top | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    stream: bool | None = None
    store: bool | None = None  # the reply may be taken up again
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    logits_processors: Refused = None
    allowed_token_ids: Refused = None
    bad_words: Refused = None
    truncate_prompt_tokens: Refused = None
    use_beam_search: Refused = None

    def check(self, limits: RequestLimits) -> None:
        """What types alone do not say. RequestError for what is wrong, or more than the limits."""
        refuse(self, SamplingFields)
        at_most(self.n or 1, limits.max_n, "n", "choices")
        at_most(len(self.stops), limits.max_stops, "stop", "stop strings")
        at_most(max(map(len, self.stops), default=0), limits.max_stop_length, "stop", "characters in a stop string")
        at_most(len(self.stop_token_ids or ()), limits.max_stop_token_ids, "stop_token_ids", "stop tokens")
        at_most(len(self.logit_bias or ()), limits.max_logit_bias, "logit_bias", "biased tokens")
        if not all(self.stops):
            raise RequestError("a stop string is empty", "leave it out", "stop")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for a stream", "add stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("a stream has no prompt_logprobs", "leave stream out", "prompt_logprobs")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, none to many."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def fill_from(self, defaults: GenerationConfig) -> None:
        """Choose tokens by the model's defaults where the request does not say how."""
        for name, value in defaults.fill(msgspec.structs.asdict(self)).items():
            setattr(self, name, value)

    @property
    def asked_tokens(self) -> int | None:
        """How many tokens may be generated, by either name; None where it is not said."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def allowed_max_tokens(self, prompt_tokens: int, max_model_len: int, most: int | None = None) -> int:
        """How many tokens may be generated: `max_tokens`, else `default_max_tokens`; of any reply not more than `most`.

        Raises HttpError where the context is too short, RequestError where `min_tokens` is more.
        """
        max_tokens = self.asked_tokens
        room = max_model_len - prompt_tokens
        if max_tokens is not None and self.takes_what_is_left:
            max_tokens = min(max_tokens, max(1, room))
        if room < 1:  # the engine makes one token at least
            raise prompt_too_long(f"{prompt_tokens} tokens > {max_model_len - 1}, as one is to follow", max_model_len)
        if max_tokens is not None and max_tokens > room:
            raise context_exceeded(prompt_tokens, max_tokens, max_model_len)
        if max_tokens is None:
            max_tokens = room if self.default_max_tokens is None else min(self.default_max_tokens, room)
        bound = f"max_tokens {max_tokens}"
        if most is not None and most < max_tokens:
            max_tokens, bound = most, f"this server gives at most {most} tokens of any reply (max_new_tokens)"
        if self.min_tokens and self.min_tokens > max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens} and {bound}", "ask for fewer", "min_tokens")
        return max_tokens

    def seeds(self) -> list[int]:
        """A seed for each of the `n` choices of a prompt: seed, seed + 1, …; drawn where the request gives none."""
        first = secrets.randbelow(_SEEDS) if self.seed is None else self.seed
        return [(first + place) % _SEEDS for place in range(self.n or 1)]

    def sampling_params(
        self,
        max_tokens: int,
        seed: int,
        eos_ids: tuple[int, ...],
        logprobs: int | None,
        echoed_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        """The engine's parameters. The engine always makes one token; a caller that wants none drops it."""
        of_prompt = [top for top in (self.prompt_logprobs, echoed_logprobs) if top is not None]
        stop_token_ids = tuple(self.stop_token_ids or ())
        return SamplingParams(
            max_tokens=max(1, max_tokens),
            **sampling_values(msgspec.structs.asdict(self)),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_logit_bias(self.logit_bias or {}),
            seed=seed,
            stop_token_ids=stop_token_ids if self.ignore_eos else tuple(dict.fromkeys((*stop_token_ids, *eos_ids))),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=max(of_prompt, default=None),
            grammar=grammar,
        )


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`. A prompt is a text, ids, or a batch of either."""

    default_max_tokens: ClassVar[int | None] = 16  # as OpenAI's
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None
    suffix: Refused = None
    prompt_embeds: Refused = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        refuse(self, CompletionRequest)
        at_most(self.best_of or 1, limits.max_n, "best_of", "choices")
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

    # How a client of its interface has replies held to calls, in a hint.
    held_calls_hint: ClassVar[str] = 'give tool_choice "required" or a function, or '
    messages: Annotated[list[RequestMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    functions: Refused = None
    function_call: Refused = None
    moderation: Refused = None
    chat_template: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        refuse(self, ChatRequest)
        if others := set(self.modalities or ()) - {"text"}:
            raise RequestError(f"modalities asks for {sorted(others)[0][:50]!r}, replies are text", param="modalities")
        at_most(len(self.messages), limits.max_messages, "messages", "messages")
        at_most(num_parts(self.messages), limits.max_json_containers, "messages", "parts of contents")
        at_most(len(self.tools or ()), limits.max_tools, "tools", "tools")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise RequestError(message, param="continue_final_message")
        check_template_kwargs(self.chat_template_kwargs)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[RequestMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        """RequestError for more than the limits."""
        at_most(len(self.messages or ()), limits.max_messages, "messages", "messages")
        at_most(num_parts(self.messages or ()), limits.max_json_containers, "messages", "parts of contents")
        at_most(len(self.tools or ()), limits.max_tools, "tools", "tools")
        check_template_kwargs(self.chat_template_kwargs)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]


def num_parts(messages: Sequence[RequestMessage]) -> int:
    """How many parts the contents of messages have. Those that are bare texts are no objects, and not counted there."""
    return sum(len(message.content) for message in messages if isinstance(message.content, list))


def at_most(have: int, most: int, param: str, what: str) -> None:
    """RequestError for more of something than is taken."""
    if have > most:
        raise RequestError(f"{param} has {have} {what}, at most {most} are taken", "send fewer", param)


def check_template_kwargs(given: dict[str, Any] | None) -> None:
    """RequestError for a variable of the template that a field of the request says."""
    overridden = {"messages", "tools", "add_generation_prompt", "continue_final_message"} & set(given or {})
    if overridden:
        message = f"chat_template_kwargs may not set {sorted(overridden)[0]}"
        raise RequestError(message, "use the field of that name", "chat_template_kwargs")


INSTEAD = dict.fromkeys(("previous_response_id", "conversation"), "send the whole conversation as input")
"""What to do where a refused field, left out, would give another reply than was asked for."""

_REFUSED_IN: dict[type, tuple[str, ...]] = {}


def refuse(request: msgspec.Struct, kind: type) -> None:
    """An error for the first refused field of `kind` that asks for something."""
    if kind not in _REFUSED_IN:
        _REFUSED_IN[kind] = tuple(name for name, mark in kind.__annotations__.items() if mark == "Refused")
    for name in _REFUSED_IN[kind]:
        if getattr(request, name) not in (None, False, "", []):
            hint = INSTEAD.get(name, f"leave {name} out")
            raise RequestError(f"{name} is not supported by this server", hint, name)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if any(not (key.isascii() and key.isdigit() and len(key) <= 9) for key in given):
        raise RequestError("logit_bias maps token ids, written as text, to numbers", param="logit_bias")
    return {int(key): value for key, value in given.items()}
