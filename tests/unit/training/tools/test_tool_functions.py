"""What calls of tools come to: results, errors that the model is told, and faults that end a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from concurrent.futures._base import DoneAndNotDoneFutures
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.post_training.tool_task import TOOLS
from tllm.core.errors import ConfigError
from tllm.core.timing import AwakeClock, Deadline
from tllm.training.tools import tool_functions
from tllm.training.tools.tool_functions import CallingTurn, FunctionCall, ToolFunctions, ToolResult
from tllm.training.tools.user_functions import UserModules

ODD = '''
import functools
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


nameless = functools.partial(give, "text")
'''


RESTS = '''
import asyncio
import time
from pathlib import Path

NOW = Path(__file__).with_name("now")


def rest() -> str:
    """Rest until the caller has looked at its clock, which has moved by an hour."""
    NOW.write_text("3600")
    time.sleep(1.5)
    return "rested"


async def rest_later() -> str:
    """As rest."""
    NOW.write_text("3600")
    await asyncio.sleep(1.5)
    return "rested"
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS + ODD)
    return tmp_path


def load(folder: Path, *names: str, seconds: float = 20.0) -> ToolFunctions:
    return ToolFunctions.load([f"{folder / 'tools.py'}:{name}" for name in names], seconds, UserModules())


def result(tools: ToolFunctions, name: str, arguments: Any) -> ToolResult:
    return results(tools, FunctionCall("call00001", name, arguments))[0]


def results(tools: ToolFunctions, *calls: FunctionCall) -> list[ToolResult]:
    (found,) = tools.results([CallingTurn(1, calls)], Deadline(tools.seconds))
    return found


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
    tools = load(folder, "give", seconds=0.05 if what == "hang" else 20.0)
    with pytest.raises(ConfigError, match=words) as caught:
        result(tools, "give", {"what": what})
    assert "\n" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize("name", ["rest", "rest_later"])
def test_time_in_which_this_process_stood_still_does_not_count(name: str, tmp_path: Path) -> None:
    """As when it is suspended while a tool is at work, for an hour."""
    (tmp_path / "tools.py").write_text(RESTS)
    now = tmp_path / "now"
    now.write_text("0")
    with closing(load(tmp_path, name)) as tools:
        turns = [CallingTurn(1, [FunctionCall("1", name, {})])]
        deadline = Deadline(3.0, AwakeClock(clock=lambda: float(now.read_text() or 0)))
        assert tools.results(turns, deadline) == [[("rested", False)]]
    assert now.read_text() == "3600"


def test_the_calls_of_a_turn_have_one_time_together(folder: Path) -> None:
    tools = load(folder, "add")
    with pytest.raises(ConfigError, match="has not returned"):
        tools.results([CallingTurn(1, [FunctionCall("call00001", "add", {"a": 1, "b": 2})])], Deadline(-1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", r"tools\.py has no function gone"),
        ("bad", "the argument a of the tool bad has no type hint"),
        ("nameless", "the type hints of the tool nameless cannot be read: .* is not a module, class"),
    ],
)
def test_what_is_no_tool_is_named(name: str, words: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(folder, "look", name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools names look of .*tools\.py, which is no file"):
        load(tmp_path, "look")


LATER = '''
import asyncio
import time
from pathlib import Path

arrived = None


async def meet(name: str) -> str:
    """Return once both have come.

    Args:
        name: Who comes.
    """
    global arrived
    if arrived is None:
        arrived = asyncio.Event(), []
    came, names = arrived
    names.append(name)
    if len(names) == 2:
        came.set()
    await came.wait()
    return "+".join(names)


async def stuck(how: str) -> str:
    """Do not return.

    Args:
        how: Whether others can.
    """
    while how == "blocked" and not Path(__file__).with_name("goes on").exists():
        time.sleep(0.01)
    if how == "raise":
        raise ValueError(how)
    if how == "exit":
        raise SystemExit(how)
    await asyncio.sleep(60)


async def quick() -> str:
    """Return at once."""
    return "here"
'''


def test_coroutines_of_all_completions_are_awaited_at_once_in_one_loop(tmp_path: Path) -> None:
    """The first waits for the second, which is another completion's; the results are in the order of the calls."""
    (tmp_path / "tools.py").write_text(TOOLS + LATER)
    with closing(load(tmp_path, "look", "meet", "stuck", "quick")) as tools:
        first = [FunctionCall("1", "meet", {"name": "a"}), FunctionCall("2", "look", {"key": "a"})]
        second = [FunctionCall("3", "quick", {"q": 1}), FunctionCall("4", "meet", {"name": "b"})]
        turns = [CallingTurn(1, first), CallingTurn(2, second), CallingTurn(3, ())]
        told = tools.results(turns, Deadline(20))
        wrong = (str({"error": "quick() got an unexpected keyword argument 'q'"}), True)
        assert told == [[("a+b", False), ("x1", False)], [wrong, ("a+b", False)], []]
        assert result(tools, "meet", {"name": "c"}) == ("a+b+c", False), "an event of the same loop"
        assert result(tools, "stuck", {"how": "raise"}) == (str({"error": "raise"}), True)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("asleep", r"the tool stuck of tools\.py has not returned: the calls of one turn have 0\.5 s"),
        ("blocked", r"the tool stuck of tools\.py has not returned: the calls of one turn have 0\.5 s"),
        ("exit", r"the tool stuck of tools\.py raised SystemExit: exit"),
    ],
)
def test_a_coroutine_that_cannot_go_on_is_named(
    how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it lets no other return. The time begins once all others have, or it keeps them from it."""
    (tmp_path / "tools.py").write_text(LATER)

    def later(results: Sequence[Future[Any]], seconds: float) -> DoneAndNotDoneFutures[Any]:
        assert tools.loop is not None
        while how == "blocked" and tools.loop.computing != "stuck":
            time.sleep(0.001)
        assert how == "blocked" or results[0] in wait(results[:1], 20).done
        return wait(results, seconds)

    monkeypatch.setattr(tool_functions, "wait", later)
    with closing(load(tmp_path, "quick", "meet", "stuck", seconds=20.0 if how == "exit" else 0.5)) as tools:
        first = FunctionCall("1", "meet", {"name": "a"}) if how == "blocked" else FunctionCall("1", "quick", {})
        with pytest.raises(ConfigError, match=words) as caught:
            results(tools, first, FunctionCall("2", "stuck", {"how": how}))
        (tmp_path / "goes on").touch()
        assert "\n" not in caught.value.message and caught.value.hint
