"""Requests of Anthropic's Messages API as types, and what they mean as a `ChatRequest`.

Fields that are not here, and those that change nothing of the reply here (`metadata`, `cache_control`, `service_tier`),
are ignored, as programs send many of them. A block or a tool that would have to be done and is not is an error that
names it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tllm.core.errors import RequestError
from tllm.server.openai.requests import ChatRequest, Refused, RequestMessage, TokenCount, refuse
from tllm.server.openai.tools import FunctionTool, NamedFunction, NamedTool, Tool, ToolChoice

NO_REASONING = {"enable_thinking": False}
REASONING = {"enable_thinking": True}
"""What chat templates of models that may reason or not read."""


class MessageBlock(msgspec.Struct, kw_only=True):
    """One block of a message's content, of whichever `type`; the fields are those of the types that are done here."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[MessageBlock] | dict[str, Any] | None = None
    is_error: bool | None = None
    source: str | dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None


class MessageTurn(msgspec.Struct, kw_only=True):
    """One message. `system` among the messages is one more system message there."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool. Those with another `type` are run by Anthropic's servers."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """Whether a tool is to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model may reason first. How long it does is not limited here: `budget_tokens` is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[MessageTurn], Meta(min_length=1)]
    system: str | list[MessageBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: TokenCount
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    store: bool | None = None  # ours: the reply may be taken up again
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    container: Refused = None
    mcp_servers: Refused = None


class MessagesChat(ChatRequest, kw_only=True):
    """The chat that a request means."""

    takes_what_is_left: ClassVar[bool] = True
    held_calls_hint: ClassVar[str] = 'give tool_choice of type "any" or "tool", or '


def as_chat(request: CountTokensRequest) -> MessagesChat:
    """The same as a chat. Where the assistant has the last word, the reply goes on with that.

    RequestError for what is not done here, by its name.
    """
    choice = request.tool_choice
    chat = MessagesChat(
        model=request.model,
        messages=[*_system(request.system), *(part for turn in request.messages for part in _turn(turn))],
        tools=[_tool(tool) for tool in request.tools or ()] or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
    )
    last = chat.messages[-1]
    chat.continue_final_message = last.role == "assistant" and bool(last.content) and not last.tool_calls
    if request.thinking is not None:
        chat.chat_template_kwargs = NO_REASONING if request.thinking.type == "disabled" else REASONING
    if isinstance(request, MessagesRequest):
        chat.max_tokens = request.max_tokens
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.stop = list(request.stop_sequences or ()) or None
        refuse(request, MessagesRequest)
        config = {"format": request.output_format, **(request.output_config or {})}
        chat.response_format = _output_format(config["format"])
        effort = config.get("effort")
        chat.reasoning_effort = effort if isinstance(effort, str) else None
    return chat


def _system(system: str | list[MessageBlock] | None) -> list[RequestMessage]:
    text = _text(system or "", "system")
    return [RequestMessage(role="system", content=text)] if text else []


def _turn(turn: MessageTurn) -> list[RequestMessage]:
    """One message, or several: results of tools are messages of their own in a chat, and come first."""
    if isinstance(turn.content, str):
        return [RequestMessage(role=turn.role, content=turn.content)]
    results, texts, reasoning, calls = list[RequestMessage](), list[str](), list[str](), list[dict[str, Any]]()
    for block in turn.content:
        if block.type == "tool_result" and turn.role == "user":
            results.append(_result(block))
        elif block.type == "tool_use" and turn.role == "assistant":
            function = {"name": _needed(block.name, block, "name"), "arguments": _json(block.input or {})}
            calls.append({"id": _needed(block.id, block, "id"), "type": "function", "function": function})
        elif block.type == "thinking" and turn.role == "assistant":
            reasoning.append(block.thinking or "")
        elif block.type != "redacted_thinking":  # nobody here can read that
            texts.append(_block_text(block, "messages"))
    if results and not texts:
        return results
    said = RequestMessage(role=turn.role, content="\n".join(texts))
    if reasoning:
        said.reasoning_content = "\n".join(reasoning)
    if calls:
        said.tool_calls = calls
    return [*results, said]


def _result(block: MessageBlock) -> RequestMessage:
    if isinstance(block.content, dict):
        raise RequestError("a tool_result's content is a text, or a list of blocks", param="messages")
    text = _text(block.content or "", "messages")
    content = f"Error: {text}" if block.is_error else text
    return RequestMessage(role="tool", content=content, tool_call_id=_needed(block.tool_use_id, block, "tool_use_id"))


def _text(content: str | list[MessageBlock], param: str) -> str:
    return content if isinstance(content, str) else "\n".join(_block_text(block, param) for block in content)


def _block_text(block: MessageBlock, param: str) -> str:
    """A block as text: what is known of a document or of what was found stands above its words."""
    if block.type == "text" and block.text is not None:
        return block.text
    if block.type == "document":
        return _joined(block.title, block.context, _document_text(block, param))
    if block.type == "search_result" and isinstance(block.source, str) and isinstance(block.content, list):
        return _joined(block.title, block.source, _text(block.content, param))
    raise RequestError(f"a block of type {block.type[:50]!r} is not supported there, only text is", param=param)


def _document_text(block: MessageBlock, param: str) -> str:
    source = block.source if isinstance(block.source, dict) else {}
    kind, data, content = source.get("type"), source.get("data"), source.get("content")
    if kind == "text" and isinstance(data, str):
        return data
    if kind == "content" and isinstance(content, str):
        return content
    if kind == "content" and isinstance(content, list):
        try:
            return _text(msgspec.convert(content, list[MessageBlock]), param)
        except msgspec.ValidationError as error:
            raise RequestError(f"a document's content cannot be read: {error}", param=param) from error
    raise RequestError(
        f"a document with a source of type {str(kind)[:50]!r} is not supported, only text is", param=param
    )


def _joined(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def _needed(value: str | None, block: MessageBlock, name: str) -> str:
    if not value:
        raise RequestError(f"a block of type {block.type} needs {name}", param="messages")
    return value


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()


def _tool(tool: MessageTool) -> Tool:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        kind = f"of type {tool.type[:50]!r} " if tool.type else ""
        message = f"the tool {tool.name[:80]!r} {kind}has no input_schema: this server runs no tools itself"
        raise RequestError(message, "leave it out, or give a tool that the client runs", "tools")
    function = FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _tool_choice(choice: MessageToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise RequestError("tool_choice of type tool needs a name", param="tool_choice")
        return NamedTool(type="function", function=NamedFunction(choice.name))
    if choice.type == "any":
        return "required"
    return choice.type


def _output_format(wanted: Any) -> dict[str, Any] | None:
    """`output_config.format`, or `output_format` by its older name, as a `response_format`."""
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or "schema" not in wanted:
        raise RequestError("output_config.format takes type json_schema with a schema", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}
