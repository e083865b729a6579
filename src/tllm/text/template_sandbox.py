"""Where chat templates run: a Jinja sandbox with a clock and a limit on how large anything may grow."""

from __future__ import annotations

import json
import time
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEMPLATE = 1 << 20  # characters of a template
MAX_OUTPUT = 16 << 20  # characters that a template may produce
MAX_SECONDS = 1.0

_deadline: ContextVar[float] = ContextVar("template deadline")


class TemplateLimit(jinja2.TemplateError):
    """A template that ran too long or grew too large."""


class _Generation(Extension):
    """`{% generation %}` marks what the model says, for training masks; to render it is to render what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a scope of its own, as names set inside do not reach the text after it
        return [nodes.Scope(body, lineno=line)]


class _Names(Namespace):
    """`namespace(...)` that holds no underscore names, so that no template reaches into Python through it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _refuse_underscore(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates of Hugging Face folders are written for."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _dict
        self.globals["namespace"] = _Names

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile with a look at the clock in each loop and macro; `jinja2.TemplateError` where it is not Jinja."""
        if len(source) > MAX_TEMPLATE:
            raise TemplateLimit(f"the template has {len(source)} characters, at most {MAX_TEMPLATE} are read")
        tree = self.parse(source)
        looping: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
        ]
        for node in looping:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return self.from_string(tree)

    def render(
        self,
        template: jinja2.Template,
        variables: dict[str, Any],
        seconds: float = MAX_SECONDS,
    ) -> str:
        """The template's text; `TemplateLimit` when it takes longer or grows larger than it may."""
        token = _deadline.set(time.monotonic() + seconds)
        try:
            parts: list[str] = []
            length = 0
            for part in template.generate(variables):
                length += len(part)
                _check_size(length)
                parts.append(part)
            return "".join(parts)
        finally:
            _deadline.reset(token)

    @staticmethod
    def tick() -> str:
        """Called in each turn of a loop; the end of the line for a template that never ends."""
        if time.monotonic() > _deadline.get():
            raise TemplateLimit("the template ran longer than it may")
        return ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, where repetition and powers could fill the memory in one step."""
        self.tick()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if hasattr(one, "__len__") and isinstance(other, int):
                    _check_size(len(one) * other)
        if operator == "**" and isinstance(right, int | float) and right > 64:
            raise TemplateLimit(f"the template takes a power of {right}")
        if operator == "+" and hasattr(left, "__len__"):
            _check_size(len(left))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call from a template; methods of a text that could multiply it are checked before."""
        self.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self._check_growth(len(owner), args)
        return super().call(context, obj, *args, **kwargs)

    @staticmethod
    def _check_growth(length: int, args: tuple[Any, ...]) -> None:
        sizes = [arg if isinstance(arg, int) else len(arg) if hasattr(arg, "__len__") else 0 for arg in args]
        # 16: a message of the longest kind may still be split or stripped by a tag of 16 characters
        if max(sizes, default=0) * max(length, 1) > 16 * MAX_OUTPUT:
            raise TemplateLimit("the template multiplies a text beyond what it may hold")


def _check_size(length: int) -> None:
    if length > MAX_OUTPUT:
        raise TemplateLimit(f"the template makes {length} characters, at most {MAX_OUTPUT} are allowed")


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < > & for web pages; models were trained on plain JSON
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
