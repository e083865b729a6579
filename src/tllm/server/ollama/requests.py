"""Requests of ollama's interface as types, and what they mean as a `ChatRequest` or a `CompletionRequest`.

Options that say how ollama loads a model (`num_ctx`, `num_gpu`, `keep_alive` and others) are ignored: the model is
loaded already. Images are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from tllm.core.errors import RequestError, counted
from tllm.server.openai.requests import ChatRequest, CompletionRequest, RequestMessage, SamplingFields, Top
from tllm.server.openai.tools import Tool
from tllm.server.pooling.requests import MAX_INPUTS

Made = TypeVar("Made", bound=SamplingFields)

UNLIMITED = (0, -1, -2)
"""Values of `num_predict` that ask for as many tokens as there is room for; ollama takes 0 so, too."""


SWITCHED_OFF: dict[str, tuple[float, ...]] = {
    "repeat_last_n": (-1,),
    "mirostat": (0,),
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "penalize_newline": (True,),
}
"""Options of ollama's that are not done here, and the values with which they change nothing. Penalties are for all of
the text, as with repeat_last_n -1."""


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How tokens are chosen; the others that ollama has are about loading."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None

    def check(self) -> None:
        """RequestError for a way of choosing tokens that is not done here, where it is asked for."""
        for name, values in SWITCHED_OFF.items():
            given = getattr(self, name)
            if given is not None and given not in values:
                message = f"options.{name} is {given}, and this way of choosing tokens is not done here"
                raise RequestError(message, f"leave {name} out", name)


class OllamaFunction(msgspec.Struct, kw_only=True):
    """What was called, with the arguments as an object."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call of a tool. They have no ids here: a result belongs to the first call of its `tool_name` that has none."""

    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class OllamaModelRequest(msgspec.Struct, kw_only=True):
    """`POST /api/show` and `POST /api/pull`."""

    model: str | None = None
    name: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What chats and generations have in common. They are streamed unless `stream` is false."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """`POST /api/chat`."""

    messages: list[OllamaMessage] = []
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """`POST /api/generate`: a prompt with the chat template around it, or with `raw` as it is."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[str] | None = None
    context: list[int] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """`POST /api/embed`. A text that is too long is cut at its end, unless `truncate` is false."""

    model: str
    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """`POST /api/embeddings`, the older one."""

    model: str
    prompt: str


class OllamaChat(ChatRequest, kw_only=True):
    """The chat that a request means; it can have calls only where the model decides so."""

    takes_what_is_left: ClassVar[bool] = True
    held_calls_hint: ClassVar[str] = ""


class OllamaCompletion(CompletionRequest, kw_only=True):
    """The completion that a request means."""

    takes_what_is_left: ClassVar[bool] = True
    default_max_tokens: ClassVar[int | None] = None


def as_chat(request: OllamaChatRequest) -> ChatRequest:
    """The same as a chat."""
    messages, calls = list[RequestMessage](), dict[str, str]()  # names of calls without a result, by their ids
    for place, message in enumerate(request.messages):
        _no_images(message.images)
        said = RequestMessage(role=message.role, content=message.content, reasoning_content=message.thinking)
        if message.tool_calls:
            calls = {f"call_{place}_{number}": call.function.name for number, call in enumerate(message.tool_calls)}
            said.tool_calls = [_call(call, call_id) for call, call_id in zip(message.tool_calls, calls, strict=True)]
        if message.role == "tool":
            said.name, first = message.tool_name, next(iter(calls), None)
            said.tool_call_id = next((one for one, name in calls.items() if name == said.name), first)
            if said.tool_call_id is not None:
                del calls[said.tool_call_id]
        messages.append(said)
    chat = OllamaChat(model=named(request.model), messages=messages, tools=request.tools)
    return _with_options(chat, request)


def as_generation(request: OllamaGenerateRequest) -> ChatRequest | CompletionRequest:
    """The same as a chat of one message, or as a completion where the prompt is to be taken as it is."""
    _no_images(request.images)
    for name in ("suffix", "template", "context", "width", "height", "steps"):
        if getattr(request, name):
            raise RequestError(f"{name} is not supported by this server", f"leave {name} out", name)
    if request.raw:
        return _with_options(OllamaCompletion(model=named(request.model), prompt=request.prompt), request)
    system = [RequestMessage(role="system", content=request.system)] if request.system else []
    user = RequestMessage(role="user", content=request.prompt)
    return _with_options(OllamaChat(model=named(request.model), messages=[*system, user]), request)


def named(model: str) -> str:
    """A model's name without the tag that ollama's programs add."""
    return model.removesuffix(":latest")


def _with_options(made: Made, request: OllamaRequest) -> Made:
    options = request.options or OllamaOptions()
    options.check()
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"):
        setattr(made, name, getattr(options, name))
    made.repetition_penalty = options.repeat_penalty
    if options.num_predict not in UNLIMITED:
        made.max_tokens = options.num_predict
    made.response_format = _format(request.format)
    if isinstance(made, CompletionRequest) and request.logprobs:
        made.logprobs = request.top_logprobs or 0
    if isinstance(made, ChatRequest):
        made.logprobs, made.top_logprobs = request.logprobs, request.top_logprobs
    if isinstance(made, ChatRequest) and request.think is not None:
        made.chat_template_kwargs = {"enable_thinking": request.think is not False}
        if isinstance(request.think, str):
            made.reasoning_effort = request.think
    return made


def _format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """`json`, or a JSON schema, as a `response_format`."""
    if not given:
        return None
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}
    if given != "json":
        raise RequestError(f"format is {given[:50]!r}; it takes json, or a JSON schema", param="format")
    return {"type": "json_object"}


def _call(call: OllamaCall, call_id: str) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _no_images(images: list[str] | None) -> None:
    if images:
        raise RequestError(
            f"images has {counted(len(images), 'image')}, and only text is supported",
            "leave it out",
            "images",
        )
