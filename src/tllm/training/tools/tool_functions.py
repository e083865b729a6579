"""`ToolFunctions`: the functions that a model may call while it writes a completion, and the results of its calls.

What a function returns becomes the text of a tool's message. As in TRL, what it raises does too, as `{"error": …}`, and
the run goes on: the model may call it otherwise. A function that does not return, or returns what no text can stand
for, ends the run. Coroutines that are called in one turn of a step are awaited together, those of all completions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from tllm.core.errors import ConfigError
from tllm.core.timing import Deadline
from tllm.training.tools.coroutine_loop import CoroutineLoop
from tllm.training.tools.environments import Environments
from tllm.training.tools.tool_schema import Schema, tool_schema
from tllm.training.tools.user_functions import UserFunction, UserModules, called, said


class FunctionCall(NamedTuple):
    """A call that a model wrote. `arguments` are an object where they are as they should be, else the text."""

    id: str
    name: str
    arguments: Any


class ToolResult(NamedTuple):
    """The text of a tool's message. `is_failure`: it tells of an error."""

    text: str
    is_failure: bool


class CallingTurn(NamedTuple):
    """The calls of a turn, and the seed by which its completion is known."""

    seed: int
    calls: Sequence[FunctionCall]


class Begun(NamedTuple):
    """A coroutine that is awaited."""

    tool: UserFunction
    result: Future[Any]


@dataclass(frozen=True)
class ToolFunctions:
    """The tools of a job, by name, and those of its environments. All calls of one turn of a step may take `seconds`
    together. `loop` is there where any tool is a coroutine."""

    functions: Mapping[str, UserFunction]
    schemas: Sequence[Schema]
    seconds: float
    environments: Environments | None = None
    loop: CoroutineLoop | None = None

    @classmethod
    def load(
        cls, texts: Sequence[str], seconds: float, modules: UserModules, factory: str | None = None
    ) -> ToolFunctions:
        """Of `FILE.py:function` each; ConfigError for one that cannot be loaded, or says too little for a model."""
        found = [modules.load(text, "tools") for text in texts]
        environments = None if factory is None else Environments(factory, seconds, modules)
        methods = () if environments is None else environments.tools
        both = {one.name for one in found} & {one.name for one in methods}
        if both:
            raise ConfigError(
                f"{min(both)} is one of tools and a method of environment_factory",
                "the model calls both by their names: rename one",
            )
        offered = [*found, *methods]
        schemas = [tool_schema(one.function, one.name) for one in offered]
        is_awaited = any(inspect.iscoroutinefunction(one.function) for one in offered)
        loop = CoroutineLoop("tools") if is_awaited else None
        return cls({one.name: one for one in found}, schemas, seconds, environments, loop)

    @property
    def parameters(self) -> dict[str, Schema]:
        """The schema of each tool's arguments, as parsers of calls want it."""
        return {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}

    def results(self, turns: Sequence[CallingTurn], deadline: Deadline) -> list[list[ToolResult]]:
        """What the calls of each turn come to, which have until then.

        Plain functions are called one after another, then coroutines all at once. ConfigError, in one line, for a tool
        that takes longer, that ends the process, or whose result is no text.
        """
        calls = [(self._tool(turn.seed, call.name), call) for turn in turns for call in turn.calls]
        at_once = [None if _is_awaited(tool, call) else self._result(tool, call, deadline) for tool, call in calls]
        begun = [
            self._begin(tool, call)
            for result, (tool, call) in zip(at_once, calls, strict=True)
            if result is None and tool is not None
        ]
        awaited = iter(self._awaited(begun, deadline))
        found = iter([next(awaited) if result is None else result for result in at_once])
        return [[next(found) for _ in turn.calls] for turn in turns]

    def close(self) -> None:
        """End the loop."""
        if self.loop is not None:
            self.loop.close()

    def _tool(self, seed: int, name: str) -> UserFunction | None:
        methods = {} if self.environments is None else self.environments.methods(seed)
        return methods.get(name) or self.functions.get(name)

    def _result(self, tool: UserFunction | None, call: FunctionCall, deadline: Deadline) -> ToolResult:
        """Of a call that is not awaited."""
        if tool is None:
            return _failure(f"Tool {call.name} not found.")
        if not isinstance(call.arguments, dict):
            return _failure(f"The arguments are no JSON object: {call.arguments}")
        outcome = called(_with(tool, call), deadline, f"tool-{tool.name}")
        if outcome is None:
            raise self._late(tool)
        return _told(tool, outcome)

    def _begin(self, tool: UserFunction, call: FunctionCall) -> Begun:
        assert self.loop is not None, "made where any tool is a coroutine"
        return Begun(tool, self.loop.begin(tool.name, _with(tool, call)))

    def _awaited(self, begun: Sequence[Begun], deadline: Deadline) -> list[ToolResult]:
        """In order, once all have come to something."""
        results, turn = [one.result for one in begun], deadline.turn()
        while (late := wait(results, turn).not_done) and turn:
            turn = deadline.turn()
        if late:
            assert self.loop is not None
            computing = self.loop.computing  # where one lets no other go on, all others are late too
            named = [one for one in begun if one.result in late and one.tool.name == computing]
            raise self._late((named or [one for one in begun if one.result in late])[0].tool)
        return [_told(one.tool, one.result) for one in begun]

    def _late(self, tool: UserFunction) -> ConfigError:
        what = f"has not returned: the calls of one turn have {self.seconds:g} s"
        return _fault(tool, what, "make it faster, or raise reward_timeout")


def _with(tool: UserFunction, call: FunctionCall) -> Callable[[], Any]:
    arguments = call.arguments
    return lambda: tool.function(**arguments)


def _is_awaited(tool: UserFunction | None, call: FunctionCall) -> bool:
    return tool is not None and isinstance(call.arguments, dict) and inspect.iscoroutinefunction(tool.function)


def _told(tool: UserFunction, outcome: Future[Any]) -> ToolResult:
    """What a call that has come to something tells the model."""
    error = outcome.exception()
    if isinstance(error, Exception):
        return _failure(str(error))
    if error is not None:
        raise _fault(tool, f"raised {said(error)}", "raise an Exception, which the model is told") from error
    return ToolResult(_text(tool, outcome.result()), False)


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
