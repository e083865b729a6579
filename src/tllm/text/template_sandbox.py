"""Where chat templates run: a Jinja sandbox with a clock and a limit on how large anything may grow.

A template comes with a model, from whoever made it. No single step of one may make more than `MAX_OUTPUT` characters,
nor look at more values than that, nor may all that it writes be more than a few times that, nor all that its steps make
more than `MAX_MADE` bytes; the clock is looked at in between. A list that holds one list twice, and so on, is small and
means very much: it is what it means that counts.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

T = TypeVar("T")

MAX_TEMPLATE = 1 << 20  # characters of a template
MAX_OUTPUT = 16 << 20  # characters that a template may produce
MAX_WRITTEN = 4 * MAX_OUTPUT  # all that is written, into macros and blocks too, and from them once more
MAX_ITEMS = 1 << 20  # of a list that is repeated
MAX_MADE = 1 << 30  # bytes of all texts and lists that steps make, as any of them may be kept
MAX_SECONDS = 1.0  # of a processor
WIDE = re.compile(r"\d{7,}")  # a width in a format that asks for millions of characters
NUMBER = re.compile(r"\d+")
STRFTIME_GROWTH = 256  # the most characters that Python makes of one of a format of dates
KEEPING = (
    "attr",
    "count",
    "d",
    "default",
    "first",
    "items",
    "last",
    "length",
    "list",
    "map",
    "random",
    "reject",
    "rejectattr",
    "select",
    "selectattr",
)
"""Filters that hand on what a value holds; all others make a text of it, or compare what is in it."""
WIDENING = ("batch", "center", "indent", "join", "replace", "slice", "tojson", "wordwrap")
"""Those that may widen it."""
COMPARING = (
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "eq",
    "equalto",
    "filter",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "le",
    "lessthan",
    "lower",
    "lt",
    "ne",
    "test",
    "upper",
)
"""Tests that look at all that two values hold, or at their texts or hashes."""
REFUSED_METHODS = ("translate", "encode", "to_bytes")
"""Of texts and numbers: the first may multiply a text, and bytes have all methods of texts once more, unwatched."""


class _Budget:
    """What one rendering may still take: seconds of the processor, as it is no template's fault that others have it."""

    def __init__(self, seconds: float) -> None:
        self.left, self.left_to_make = MAX_WRITTEN, MAX_MADE
        self._soonest = time.monotonic() + seconds  # before which it cannot have used them; this clock is read quickly
        self._until = time.thread_time() + seconds

    @property
    def is_spent(self) -> bool:
        return time.monotonic() > self._soonest and time.thread_time() > self._until


_budget: ContextVar[_Budget | None] = ContextVar("template budget", default=None)


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


class _Weighed(NodeTransformer):
    """Functions of the sandbox, which look at how large a thing is, where Jinja has none: `a ~ b`, `a == b`, and
    `{a: 1}`, for which `a` is hashed."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None).set_lineno(node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        simple = nodes.Const | nodes.Compare | nodes.Test | nodes.Not | nodes.Mod
        every: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        sides = [one for one in every if not isinstance(one.expr, simple)]
        if len(sides) > 1:  # else a text, a number or a truth is compared, which tells at once
            for one in sides:
                one.expr = _weighed(one.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _weighed(pair.key)
        return node


def _weighed(value: nodes.Expr) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute("weighed"), [value], [], None, None, lineno=value.lineno)


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
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded(name, each) for name, each in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests |= {name: _bounded(name, tests[name]) for name in COMPARING}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _dict
        self.globals["namespace"] = _Names

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile with a look at the clock in each loop and macro; `jinja2.TemplateError` where it is not Jinja."""
        if len(source) > MAX_TEMPLATE:
            raise TemplateLimit(f"the template has {len(source)} characters, at most {MAX_TEMPLATE} are read")
        tree = _Weighed().visit(self.parse(source))
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
        token = _budget.set(_Budget(seconds))
        try:
            parts: list[str] = []
            length = 0
            for part in template.generate(variables):
                length += len(part)
                _check_size(length)
                parts.append(part)
            return "".join(parts)
        finally:
            _budget.reset(token)

    @staticmethod
    def tick() -> str:
        """Called in each turn of a loop; the end of the line for a template that never ends."""
        budget = _budget.get()
        if budget is not None and budget.is_spent:
            raise TemplateLimit("the template ran longer than it may")
        return ""

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a macro or a block has written, as one text: what stands in the template itself is no value, and is
        looked at here alone."""
        written = list(parts)
        _spend(sum(map(len, written)))
        return "".join(written)

    @staticmethod
    def weighed(value: Any) -> Any:
        """A value that is to be compared or hashed, for which all that it holds may be looked at."""
        _check_weight(value)
        return value

    @staticmethod
    def joined(*values: Any) -> str:
        """What `~` makes of values."""
        _check_weight(values)
        return _made("".join(map(str, values)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, where repetition and powers could fill the memory in one step."""
        self.tick()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str) and isinstance(other, int):
                    _check_size(len(one) * other)
                elif hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > MAX_ITEMS:
                    raise TemplateLimit(
                        f"the template makes a list of {len(one) * other}, at most {MAX_ITEMS} are allowed"
                    )
        if operator == "%" and isinstance(left, str):
            _check_weight(right)
            _check_format(left, right if isinstance(right, tuple) else (right,))
            if isinstance(right, dict):
                _check_repeated(left, right.values())
        if operator == "**" and isinstance(right, int | float) and right > 64:
            raise TemplateLimit(f"the template takes a power of {right}")
        if operator == "**" and isinstance(left, int) and left.bit_length() > 64:
            raise TemplateLimit(f"the template takes a power of a number of {left.bit_length()} bits")
        if operator == "+" and hasattr(left, "__len__"):
            _check_size(len(left))
        return _made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """What stands at a place, which may be found by the hash of all that `argument` holds."""
        _check_weight(argument)
        found = super().getitem(obj, argument)
        return _made(found) if isinstance(argument, slice) else found

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call from a template. What is not the template's own may compare, hash or show all that it is given;
        methods of a text that could multiply it are checked before."""
        self.tick()
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the base class wraps `format`
        name = getattr(obj, "__name__", "")
        if isinstance(owner, str | int) and name in REFUSED_METHODS:
            raise TemplateLimit(f"a template may not call {name}")
        if not isinstance(obj, Macro):
            args = tuple(map(_whole, args))
            _check_weight((*args, *kwargs.values()))
        if isinstance(owner, str):
            given = (*args, *kwargs.values())
            _check_growth(len(owner), given)
            if name in ("format", "format_map"):
                _check_format(owner, given)
                _check_repeated(owner, given)
        return _made(super().call(context, obj, *args, **kwargs))


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test, with a look at the clock and at what it is given to multiply."""

    @functools.wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _budget.get() is None:  # Jinja would write what comes of constants into the template's code
            raise nodes.Impossible
        Sandbox.tick()
        before = args[: hasattr(made, "jinja_pass_arg")]
        value, *others = args[len(before) :]
        given = (*others, *kwargs.values())
        if name not in KEEPING:
            value = _whole(value)
            _check_weight(value)
        _check_weight(given)
        if name in WIDENING:
            _check_growth(len(value) if hasattr(value, "__len__") else 1, given)
            _check_size(max((one for one in given if isinstance(one, int)), default=0))
        if name == "format":
            _check_format(str(value), given)
            _check_repeated(str(value), kwargs.values())
        result = made(*before, value, *others, **kwargs)
        if isinstance(result, str):
            _check_size(len(result))
        return _made(result)

    return checked


def _whole(value: Any) -> Any:
    """What `map` and its like give one by one, as a list, which can be weighed; any other value as it is."""
    return list(value) if isinstance(value, Iterator) else value


def _written(value: Any) -> Any:
    """What is written of an expression: it counts among all that is."""
    _check_weight(value)
    if isinstance(value, str):
        _spend(len(value))
    return value


def _spend(length: int) -> None:
    """So many characters are written."""
    _check_size(length)
    budget = _budget.get()
    if budget is not None:
        budget.left -= length
        if budget.left < 0:
            raise TemplateLimit(f"the template writes more than {MAX_WRITTEN} characters in all")


def _made(value: T) -> T:
    """What a step gives, with its bytes counted among those of all steps. Those of what a list holds are left out: most
    often another step has made that."""
    budget = _budget.get()
    if budget is not None and isinstance(value, str | list | tuple | dict):
        budget.left_to_make -= sys.getsizeof(value)
        if budget.left_to_make < 0:
            raise TemplateLimit(f"the template makes more than {MAX_MADE} bytes in all")
    return value


def _check_growth(length: int, given: Iterable[Any]) -> None:
    sizes = [one if isinstance(one, int) else len(one) if hasattr(one, "__len__") else 0 for one in given]
    # 16: a message of the longest kind may still be split or stripped by a tag of 16 characters
    if max(sizes, default=0) * max(length, 1) > 16 * MAX_OUTPUT:
        raise TemplateLimit("the template multiplies a text beyond what it may hold")


def _check_format(form: str, values: Iterable[Any]) -> None:
    """A format may ask for millions of characters by its widths, in itself or, by a star, in values."""
    widths = sum(abs(value) for value in values if isinstance(value, int)) if "*" in form else 0
    if WIDE.search(form) or widths + sum(map(int, NUMBER.findall(form))) > MAX_OUTPUT:
        raise TemplateLimit("the template formats a text with a width of millions of characters")


def _check_repeated(form: str, values: Iterable[Any]) -> None:
    """A format that names its values may write one of them as often as it likes."""
    _check_growth(len(form), [_check_weight(value) for value in values])


def _check_weight(value: Any) -> int:
    """Of all that a value holds, to be made a text or compared: it is walked until it is known to be too large."""
    if isinstance(value, str):
        _check_size(len(value))
        return len(value)
    total, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        else:
            total += 1
            waiting += _held(one)
            Sandbox.tick()
        _check_size(total)
    return total


def _held(value: Any) -> Iterable[Any]:
    """What a value holds that its text shows."""
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")  # which no template can ask for
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list | tuple | KeysView | ValuesView | ItemsView) else ()


def _check_size(length: int) -> None:
    if length > MAX_OUTPUT:
        raise TemplateLimit(f"the template makes {length} characters, at most {MAX_OUTPUT} are allowed")


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _check_size(len(form) * STRFTIME_GROWTH)
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
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    parts, length = list[str](), 0
    for part in encoder.iterencode(value):  # an indent is written for each line, and deeper ones several times
        length += len(part)
        _check_size(length)
        parts.append(part)
    return "".join(parts)
