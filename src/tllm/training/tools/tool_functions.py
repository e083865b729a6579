"""`ToolFunctions`: the functions that a model may call while it writes a completion, and what its calls come to.

What a function returns becomes the text of a tool's message. As in TRL, what it raises does too, as `{"error": …}`, and
the run goes on: the model may call it otherwise. A function that does not return, or returns what no text can stand
for, ends the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tllm.core.errors import ConfigError
from tllm.training.tools.tool_schema import Schema, tool_schema
from tllm.training.tools.user_functions import UserFunction, called, load_function, said


class FunctionCall(NamedTuple):
    """A call that a model wrote. `arguments` are an object where they are as they should be, else the text."""

    id: str
    name: str
    arguments: Any


class ToolResult(NamedTuple):
    """The text of a tool's message. `is_failure`: it tells of an error."""

    text: str
    is_failure: bool


@dataclass(frozen=True)
class ToolFunctions:
    """The tools of a job, by name. All calls of one turn of a step may take `seconds` together."""

    functions: Mapping[str, UserFunction]
    schemas: Sequence[Schema]
    seconds: float

    @classmethod
    def load(cls, texts: Sequence[str], seconds: float) -> ToolFunctions:
        """Of `FILE.py:function` each; ConfigError for one that cannot be loaded, or says too little for a model."""
        found = [load_function(text, "tools") for text in texts]
        return cls({one.name: one for one in found}, [_schema(one) for one in found], seconds)

    @property
    def parameters(self) -> dict[str, Schema]:
        """The schema of each tool's arguments, as parsers of calls want it."""
        return {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}

    def result(self, call: FunctionCall, until: float) -> ToolResult:
        """What a call comes to, which has until then by `time.monotonic`.

        ConfigError, in one line, for a tool that takes longer, that ends the process, or whose result is no text.
        """
        tool = self.functions.get(call.name)
        if tool is None:
            return _failure(f"Tool {call.name} not found.")
        if not isinstance(call.arguments, dict):
            return _failure(f"The arguments are no JSON object: {call.arguments}")
        arguments, left = call.arguments, until - time.monotonic()
        outcome = called(lambda: tool.function(**arguments), left, f"tool-{tool.name}") if left > 0 else None
        if outcome is None:
            raise _fault(
                tool,
                f"has not returned: the calls of one turn have {self.seconds:g} s",
                "make it faster, or raise reward_timeout",
            )
        error = outcome.exception()
        if isinstance(error, Exception):
            return _failure(str(error))
        if error is not None:
            raise _fault(tool, f"raised {said(error)}", "raise an Exception, which the model is told") from error
        return ToolResult(_text(tool, outcome.result()), False)


def _schema(tool: UserFunction) -> Schema:
    """As the model calls the function: by the name that the job has for it."""
    schema = tool_schema(tool.function)
    return {**schema, "function": {**schema["function"], "name": tool.name}}


def _failure(text: str) -> ToolResult:
    return ToolResult(str({"error": text}), True)


def _text(tool: UserFunction, value: Any) -> str:
    """A result as text: itself, or what Python writes for a value that JSON has, as in TRL."""
    try:
        if not isinstance(value, str):
            json.dumps(value)
        text = str(value)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _fault(
            tool,
            f"returned a {type(value).__name__}, which is neither a text nor JSON",
            "return a text, a number, or lists and dicts of them",
        ) from error
    return text


def _fault(tool: UserFunction, what: str, hint: str) -> ConfigError:
    return ConfigError(f"the tool {tool.name} of {tool.file.name} {what}", hint)
