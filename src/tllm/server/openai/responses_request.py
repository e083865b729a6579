"""Requests of OpenAI's Responses API as types, and what they mean as a `ChatRequest`.

A conversation comes whole with each request, and `previous_response_id` is refused: responses are kept for a while
only to be taken up again, where `background` or `store` asks for that. Tools that OpenAI's servers run (`web_search`
and others) are not offered to the model, as agents send them whether they are needed or not; `tools` of the reply shows
those that are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tllm.core.errors import RequestError
from tllm.server.openai.requests import (
    ChatRequest,
    Priority,
    Refused,
    RequestMessage,
    Salt,
    TokenCount,
    Top,
    refuse,
)
from tllm.server.openai.tools import FunctionTool, NamedFunction, NamedTool, Tool, ToolChoice

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"
"""What `include` may ask for. The others are of tools that OpenAI's servers run, and nothing of those comes."""


class InputPart(msgspec.Struct, kw_only=True):
    """One part of a content; only text is understood."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of a conversation, of whichever `type`; the fields are those of the types that are done here."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool; those of another type than `function` are not offered."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextConfig(msgspec.Struct, kw_only=True):
    """The form of the text: a `response_format` whose schema is not nested; `verbosity` is for the chat template."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much the model reasons, where its chat template asks for that."""

    effort: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    include: list[str] | None = None
    top_logprobs: Top | None = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    max_tool_calls: Refused = None
    moderation: Refused = None

    @property
    def may_be_taken_up(self) -> bool:
        """Whether it is to be kept. OpenAI's servers store what does not say otherwise; here that must be asked for, as
        the reply would be computed to its end even for a client that has gone away."""
        return bool(self.background or self.store)

    def functions(self) -> list[ResponseTool]:
        """The tools that the model is offered."""
        return [tool for tool in self.tools or () if tool.type == "function"]


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The same as a chat. RequestError for what is not done here, by its name."""
    refuse(request, ResponsesRequest)
    if request.background and request.store is False:
        raise RequestError("a response in the background is stored until it is fetched", "leave store out", "store")
    chat = ChatRequest(
        model=request.model,
        messages=_messages(request),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=[_tool(tool) for tool in request.functions()] or None,
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        priority=request.priority,
        cache_salt=request.cache_salt,
        logprobs=LOGPROBS in (request.include or ()) or request.top_logprobs is not None,
        top_logprobs=request.top_logprobs,
    )
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.text is not None:
        chat.verbosity = request.text.verbosity
    return chat


def _messages(request: ResponsesRequest) -> list[RequestMessage]:
    messages = [RequestMessage(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, RequestMessage(role="user", content=request.input)]
    for item in request.input:
        if item.type == "message" and item.role is not None:
            said = RequestMessage(role=item.role, content=_text(item.content))
            if item.role == "assistant" and _is_open(messages):  # its reasoning came as an item of its own
                messages[-1].content = said.content
            else:
                messages.append(said)
        elif item.type == "function_call":
            said = _assistant(messages)
            said.tool_calls = [*(said.tool_calls or ()), _call(item)]
        elif item.type == "function_call_output":
            call_id = _needed(item.call_id, item, "call_id")
            messages.append(RequestMessage(role="tool", content=_text(item.output), tool_call_id=call_id))
        elif item.type == "reasoning":
            messages.append(RequestMessage(role="assistant", reasoning_content=_text(item.content or item.summary)))
        else:
            raise RequestError(f"an input item of type {item.type[:50]!r} is not supported", param="input")
    if not messages:
        raise RequestError("input has no items", "give a text, or a message", "input")
    return messages


def _is_open(messages: list[RequestMessage]) -> bool:
    """Whether the last message is the assistant's, and has neither text nor calls yet."""
    return bool(messages) and messages[-1].role == "assistant" and not (messages[-1].content or messages[-1].tool_calls)


def _assistant(messages: list[RequestMessage]) -> RequestMessage:
    """The assistant's last message, which calls belong to; a new one where somebody else spoke last."""
    if not messages or messages[-1].role != "assistant":
        messages.append(RequestMessage(role="assistant", content=""))
    return messages[-1]


def _call(item: InputItem) -> dict[str, Any]:
    function = {"name": _needed(item.name, item, "name"), "arguments": item.arguments or "{}"}
    return {"id": _needed(item.call_id, item, "call_id"), "type": "function", "function": function}


def _text(content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXT_PARTS or part.text is None:
            raise RequestError(f"content of type {part.type[:50]!r} is not supported, only text is", param="input")
    return "\n".join(part.text or "" for part in content)


def _needed(value: str | None, item: InputItem, name: str) -> str:
    if not value:
        raise RequestError(f"an input item of type {item.type} needs {name}", param="input")
    return value


def _tool(tool: ResponseTool) -> Tool:
    if not tool.name:
        raise RequestError("a tool of type function needs a name", param="tools")
    function = FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _tool_choice(request: ResponsesRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if isinstance(choice, ChosenFunction):
        return NamedTool(type="function", function=NamedFunction(choice.name))
    return None if choice == "auto" and not request.functions() else choice


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    """As `response_format` has it."""
    given = text.format if text is not None else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": given.get("schema")}}
