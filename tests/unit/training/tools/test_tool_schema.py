"""A function as a JSON schema: the one that transformers makes, and one line for each function that says too little."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from tllm.core.errors import ConfigError
from tllm.training.tools.tool_schema import tool_schema


class Way(Enum):
    """Where to."""

    UP = "up"
    DOWN = "down"


def add(a: int, b: float = 1.0) -> float:
    """Add two numbers.

    It takes them as they are,
    and gives the sum.

    Args:
        a: The first
            number: it may be negative.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


def everything(
    drink: str,
    numbers: Optional[list[int]] = None,  # noqa: UP045 - users write both
    either: Union[int, str] = 1,  # noqa: UP007
    one_of: Literal["x", 2] = "x",
    way: Way = Way.UP,
    table: dict[str, int] | None = None,
    pair: tuple[int, str] = (1, "a"),
    plain: list = [],  # type: ignore[type-arg]  # noqa: B006
    anything: Any = None,
    mixed: int | list[str] = 1,
    yes: bool = False,
) -> dict[str, list[int]]:
    """Take everything.

    Args:
        drink: What to drink (choices: ["tea", " coffee "])
        numbers: Some numbers.
        either: A number or a text.
        one_of: One of two.
        way: Where to.
        table: By name.
        pair: Two.
        plain: A list.
        anything: Whatever it is.
        mixed: One or several.
        yes: Whether.
    Raises:
        ValueError: never
    """
    return {}


def nothing() -> None:
    """Take nothing."""


@pytest.mark.parametrize("function", [add, everything, nothing])
def test_it_is_the_schema_that_transformers_makes(function: Callable[..., Any]) -> None:
    """In the same order, as templates write it."""
    assert json.dumps(tool_schema(function, function.__name__)) == json.dumps(get_json_schema(function))


def silent(a: int) -> int:
    return a


def unhinted(a) -> int:  # type: ignore[no-untyped-def]
    """Do.

    Args:
        a: A number.
    """
    return int(a)


def undescribed(a: int) -> int:
    """Do."""
    return a


def odd(a: set[int]) -> int:
    """Do.

    Args:
        a: Numbers.
    """
    return len(a)


def lost(a: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Do.

    Args:
        a: A thing.
    """
    return 0


def loose(**rest: int) -> int:
    """Do.

    Args:
        rest: Numbers.
    """
    return 0


def unchosen(a: str) -> str:
    """Do.

    Args:
        a: A text (choices: tea or coffee)
    """
    return a


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (silent, "the tool silent has no docstring"),
        (unhinted, "the argument a of the tool unhinted has no type hint"),
        (undescribed, "the docstring of the tool undescribed does not describe the argument a"),
        (odd, r"the argument a of the tool odd has a type hint that JSON cannot hold: set\[int\]"),
        (lost, "the type hints of the tool lost cannot be read: name 'Nowhere' is not defined"),
        (loose, r"the tool loose takes \*\*rest: .*int.*, which a model cannot name"),
        (unchosen, "the choices of the argument a of the tool unchosen are no JSON: tea or coffee"),
    ],
)
def test_a_function_that_says_too_little_is_refused_by_name(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tool_schema(function, function.__name__)
    assert "\n" not in caught.value.message and caught.value.hint
