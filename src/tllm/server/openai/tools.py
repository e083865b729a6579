"""Tools of a chat request: what is wrong with them, what the template sees, and how the reply is held and read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tllm.core.errors import RequestError
from tllm.server.reply.held_calls import HeldTool
from tllm.server.reply.tool_formats import ToolFormat, named_call, required_calls
from tllm.spec.request import Grammar

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")  # as long as Anthropic's and MCP's; OpenAI's end at 64
Schema = dict[str, Any]


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a tool does and takes. With `strict` true a request is refused whose arguments cannot be held to the schema;
    with false they are any JSON object where the model decides whether it calls (`HeldCalls`).
    """

    name: str
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(msgspec.Struct):
    """The function that a choice names."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class OfferedTools:
    """The tools of one request, checked. None are offered where `tool_choice` is "none"."""

    def __init__(self, tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> None:
        given = tools or []
        names = [tool.function.name for tool in given]
        for name in names:
            if not _NAME.match(name):
                message = f"a tool is called {name[:80]!r}; names have 1 to 128 letters, digits, '_', '.' and '-'"
                raise RequestError(message, param="tools")
            if names.count(name) > 1:
                raise RequestError(f"two tools are called {name!r}", "give each its own name", "tools")
        if not given and choice not in (None, "none"):
            raise RequestError("tool_choice asks for a call and there are no tools", "give tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            message = f"tool_choice names {choice.function.name[:80]!r}, which is none of the tools"
            raise RequestError(message, f"the tools are {', '.join(names)[:300]}", "tool_choice")
        self.choice: ToolChoice = choice or "auto"
        self.tools = [] if choice == "none" else given
        self.is_parallel = parallel is not False

    @property
    def is_held(self) -> bool:
        """Whether a grammar makes the whole reply a call."""
        return bool(self.tools) and self.choice != "auto"

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Of each tool's arguments."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def held(self) -> tuple[HeldTool, ...]:
        """What holds the tools' calls."""
        return tuple(
            HeldTool(tool.function.name, _arguments(tool.function.parameters or {}), tool.function.strict)
            for tool in self.tools
        )

    def for_template(self) -> list[Schema] | None:
        """As chat templates read them."""
        return [msgspec.to_builtins(tool) for tool in self.tools] or None

    def grammar(self) -> Grammar | None:
        """What holds the reply to calls: the arguments of one function, or a list of calls; None for a free reply."""
        if not self.is_held:
            return None
        if isinstance(self.choice, NamedTool):
            return _schema_grammar(_arguments(self.schemas[self.choice.function.name]))
        calls = [_call_schema(name, schema) for name, schema in self.schemas.items()]
        one = calls[0] if len(calls) == 1 else {"anyOf": calls}
        most = {} if self.is_parallel else {"maxItems": 1}
        definitions = _definitions(self.schemas)
        return _schema_grammar({"type": "array", "minItems": 1, **most, "items": one, **definitions})

    def reply(self) -> ToolFormat | None:
        """How a reply that is held is read; None where the model writes calls in its own way."""
        if not self.is_held:
            return None
        return named_call(self.choice.function.name) if isinstance(self.choice, NamedTool) else required_calls


def _arguments(schema: Mapping[str, Any]) -> Schema:
    """Arguments are an object, whatever the schema leaves open; of a tool without a schema it has no members."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


def _call_schema(name: str, schema: Mapping[str, Any]) -> Schema:
    arguments = {key: value for key, value in _arguments(schema).items() if key not in ("$defs", "definitions")}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _definitions(schemas: Mapping[str, Mapping[str, Any]]) -> Schema:
    """Definitions that schemas refer to from their root, which is another one now. Two that differ are refused."""
    moved: dict[str, dict[str, Any]] = {}
    for name, schema in schemas.items():
        for key in ("$defs", "definitions"):
            given = schema.get(key) or {}
            if not isinstance(given, dict):
                raise RequestError(
                    f"{key} of the tool {name} is a {type(given).__name__}, not an object", param="tools"
                )
            for word, definition in given.items():
                known = moved.setdefault(key, {}).setdefault(word, definition)
                if known != definition:
                    message = f"{key}.{word[:80]} of the tool {name} is another one than that of a tool before it"
                    raise RequestError(message, "give the definitions different names", "tools")
    return dict(moved)


def _schema_grammar(schema: Schema) -> Grammar:
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode())
