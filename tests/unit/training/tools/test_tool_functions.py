"""What calls of tools come to: results, errors that the model is told, and faults that end a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.post_training.tool_task import TOOLS
from tllm.core.errors import ConfigError
from tllm.training.tools.tool_functions import FunctionCall, ToolFunctions, ToolResult

ODD = '''
import sys
import threading

hang = threading.Event()


def give(what: str) -> object:
    """Give something back.

    Args:
        what: What.
    """
    if what == "hang":
        hang.wait(60)
    if what == "exit":
        sys.exit("enough")
    return {
        "text": "as it is\\n",
        "number": 12,
        "nothing": None,
        "table": {"a": [1, True]},
        "set": {1},
        "self": give,
        "half": "\\ud800",
    }[what]


def bad(a):
    """Do."""
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS + ODD)
    return tmp_path


def load(folder: Path, *names: str, seconds: float = 5.0) -> ToolFunctions:
    return ToolFunctions.load([f"{folder / 'tools.py'}:{name}" for name in names], seconds)


def result(tools: ToolFunctions, name: str, arguments: Any) -> ToolResult:
    return tools.result(FunctionCall("call00001", name, arguments), time.monotonic() + tools.seconds)


def test_a_result_is_text_or_what_python_writes_for_it(folder: Path) -> None:
    tools = load(folder, "look", "add", "give")
    assert [one["function"]["name"] for one in tools.schemas] == ["look", "add", "give"]
    assert tools.parameters["add"]["required"] == ["a", "b"]
    assert result(tools, "look", {"key": "a"}) == ("x1", False)
    assert result(tools, "add", {"b": 2, "a": 1}) == ("3", False)
    told = [result(tools, "give", {"what": what}) for what in ("text", "number", "nothing", "table")]
    assert told == [(text, False) for text in ("as it is\n", "12", "None", "{'a': [1, True]}")]


def test_the_model_is_told_of_errors(folder: Path) -> None:
    """As TRL does: `str` of a dict with what the exception says."""
    tools = load(folder, "look", "add")
    for name, arguments, said in (
        ("look", {"key": "c"}, "'c'"),
        ("look", {}, "look() missing 1 required positional argument: 'key'"),
        ("add", {"a": 1, "q": 2}, "add() got an unexpected keyword argument 'q'"),
        ("add", [1], "The arguments are no JSON object: [1]"),
        ("add", '{"a": ', 'The arguments are no JSON object: {"a": '),
        ("give", {}, "Tool give not found."),
    ):
        assert result(tools, name, arguments) == (str({"error": said}), True)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hang", r"the tool give of tools\.py has not returned: the calls of one turn have 0\.05 s"),
        ("exit", r"the tool give of tools\.py raised SystemExit: enough"),
        ("set", r"the tool give of tools\.py returned a set, which is neither a text nor JSON"),
        ("half", r"the tool give of tools\.py returned a str, which is neither a text nor JSON"),
        ("self", r"the tool give of tools\.py returned a function, which is neither a text nor JSON"),
    ],
)
def test_what_cannot_go_on_ends_in_one_line(what: str, words: str, folder: Path) -> None:
    tools = load(folder, "give", seconds=0.05 if what == "hang" else 5.0)
    with pytest.raises(ConfigError, match=words) as caught:
        result(tools, "give", {"what": what})
    assert "\n" not in caught.value.message and caught.value.hint


def test_the_calls_of_a_turn_have_one_time_together(folder: Path) -> None:
    tools = load(folder, "add")
    with pytest.raises(ConfigError, match="has not returned"):
        tools.result(FunctionCall("call00001", "add", {"a": 1, "b": 2}), time.monotonic() - 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone", r"tools\.py has no function gone"), ("bad", "the argument a of the tool bad has no type hint")],
)
def test_what_is_no_tool_is_named(name: str, words: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(folder, "look", name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools names look of .*tools\.py, which is no file"):
        load(tmp_path, "look")
