"""Objects of the user's own, one for each completion: what is a tool, what is reset and used again, what is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.post_training.tool_task import TOOLS, tool_grpo, tool_job, write_tool_task
from tllm.core.errors import ConfigError
from tllm.core.timing import Deadline
from tllm.training.job.initial_model import open_initial_model
from tllm.training.policy.completion_rewards import CompletionRewards
from tllm.training.policy.rollouts import Completion, Turns
from tllm.training.policy.started_prompts import start_prompts
from tllm.training.tools.environments import Environments
from tllm.training.tools.tool_functions import CallingTurn, FunctionCall, ToolFunctions
from tllm.training.tools.user_functions import UserModules

GAMES = '''
from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Game:
    """A number that grows."""

    made = 0
    steps: list[int] = field(default_factory=list)

    def __post_init__(self):
        Game.made += 1
        self.number = Game.made

    def reset(self, prompt, start, how="", **row):
        self.total, self.steps = start, []
        if how == "hang":
            time.sleep(60)
        if how == "number":
            return 3
        if how == "raise":
            raise ValueError("no such game")
        return None if how == "silent" else f" from {self.number if how == 'unlike' else start}"

    def go(self, by: int) -> int:
        """Add to the number.

        Args:
            by: How much.
        """
        self.total += by
        self.steps.append(by)
        return self._told()

    def _told(self):
        return self.total

    def get_reward(self):
        return self.total / 10


class Bare:
    def go(self):
        """Do."""


class Mute:
    def reset(self, **row):
        pass


class Late(Mute):
    def go(self):
        """Do."""

    async def get_reward(self):
        return 1.0


class Fails(Game):
    def __init__(self):
        raise OSError("no screen")


class Unrewarded(Mute):
    def go(self):
        """Do."""


def rewards(environments, start, **columns):
    """Of games of the class that this module has."""
    return [sum(one.steps) if isinstance(one, Game) else None for one in environments]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "games.py").write_text(GAMES)
    return tmp_path


def games(folder: Path, name: str = "Game", seconds: float = 20.0) -> Environments:
    return Environments(f"{folder / 'games.py'}:{name}", seconds, UserModules())


def test_each_completion_has_a_state_of_its_own(folder: Path) -> None:
    (folder / "tools.py").write_text(TOOLS)
    factory = f"{folder / 'games.py'}:Game"
    tools = ToolFunctions.load([f"{folder / 'tools.py'}:add"], 20.0, UserModules(), factory)
    with closing(tools):
        assert [one["function"]["name"] for one in tools.schemas] == ["add", "go"], "neither reset nor private ones"
        assert tools.parameters["go"]["required"] == ["by"] and tools.environments is not None
        rows: list[dict[str, Any]] = [{"prompt": "", "start": start} for start in (1, 5)]
        assert tools.environments.begin([11, 12], rows) == [" from 1", " from 5"]
        turns = [
            CallingTurn(12, [FunctionCall("1", "go", {"by": 2}), FunctionCall("2", "go", {"by": 1})]),
            CallingTurn(11, [FunctionCall("1", "add", {"a": 1, "b": 1}), FunctionCall("2", "go", {"by": 2})]),
        ]
        told = [[one.text for one in each] for each in tools.results(turns, Deadline(5))]
        assert told == [["7", "8"], ["2", "3"]]


def test_environments_are_reset_and_used_again(folder: Path) -> None:
    found = games(folder)
    row = {"prompt": "", "start": 1}
    assert found.begin([1, 2], [row, row]) == [" from 1"] * 2
    first = found.instances([1, 2])
    first[0].go(4)
    found.end([1, 2])
    assert found.begin([3, 4, 5], [row] * 3) == [" from 1"] * 3
    again = found.instances([3, 4, 5])
    assert [one.number for one in again] == [1, 2, 3] and again[:2] == first and again[0].steps == []
    assert found.has_reward and found.name == "Game"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Bare", r"the environment Bare of games\.py makes a Bare without reset"),
        ("Mute", r"the environment Mute of games\.py has no public method"),
        ("Late", r"the environment Late of games\.py has a coroutine get_reward"),
        ("Fails", r"the environment Fails of games\.py raised OSError: no screen in its making"),
        ("Nothing", r"games\.py has no function Nothing"),
    ],
)
def test_what_is_no_environment_is_named(name: str, words: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        games(folder, name)
    assert "\n" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hang", r"has not returned from reset: those of one step have 0\.1 s together"),
        ("number", "returned a int from reset"),
        ("raise", "raised ValueError: no such game in reset"),
    ],
)
def test_a_reset_that_goes_wrong_ends_in_one_line(how: str, words: str, folder: Path) -> None:
    found = games(folder, seconds=0.1 if how == "hang" else 20.0)
    with pytest.raises(ConfigError, match=rf"the environment Game of games\.py {words}"):
        found.begin([1], [{"prompt": "", "start": 1, "how": how}])


def test_a_tool_and_a_method_of_one_name_are_refused(folder: Path) -> None:
    (folder / "tools.py").write_text(TOOLS.replace("def add", "def go"))
    with pytest.raises(ConfigError, match="go is one of tools and a method of environment_factory"):
        ToolFunctions.load([f"{folder / 'tools.py'}:go"], 20.0, UserModules(), f"{folder / 'games.py'}:Game")


def test_prompts_have_what_reset_returns_and_share_what_is_alike(folder: Path) -> None:
    write_tool_task(folder)
    found = games(folder)
    table = tool_grpo(folder, environment_factory=f"{folder / 'games.py'}:Game", tools=())
    opened = open_initial_model(tool_job(folder, folder / "run", table))
    prompts = opened.prompts(tool_job(folder, folder / "run", table))
    rows = [row._replace(columns=row.columns | {"start": 2}) for row in prompts.prompts(0)[:3]]
    rows[1].columns["how"], rows[2].columns["how"] = "unlike", "silent"
    started = start_prompts(rows, [[1, 2], [3, 4], [5, 6]], prompts, found)
    assert [group.seeds for group in started.groups] == [(1, 2), (3,), (4,), (5, 6)]
    assert [row.columns["prompt"][-1]["content"][2:] for row in started.rows_N] == [
        " from 2", " from 2", " from 3", " from 4", "", "",
    ]  # fmt: skip
    assert len(started.groups[0].ids) == len(rows[0].ids) + len(" from 2") and started.groups[3].ids == rows[2].ids
    rewards = CompletionRewards(
        tool_grpo(folder, reward_funcs=(f"{folder / 'games.py'}:rewards",), reward_weights=(10.0,)),
        opened.reply_tokenizer,
        modules := UserModules(),
        Environments(f"{folder / 'games.py'}:Game", 20.0, modules),
    )
    assert rewards.environments is not None
    started = start_prompts(rows[:1], [[7, 8]], prompts, rewards.environments)
    rewards.environments.instances([7])[0].go(3)
    completions = [Completion((0,), (-1.0,), False, Turns((1,), (), 0, 0))] * 2
    rewards_NF = rewards.of(started, completions, rewards.texts(completions))
    assert rewards_NF.tolist() == [[3.0, 0.5], [0.0, 0.2]], "one class for the function and the factory"
    assert rewards.together(rewards_NF, 2).tolist() == [[30.5, 0.2]], "its own reward has the weight 1"
    prompts.close()
    longest = rows[0]._replace(columns=rows[0].columns | {"start": 10**40})
    with pytest.raises(ConfigError, match=r"the prompt has 5[0-9] tokens, and seq_len less max_completion_length"):
        start_prompts([longest], [[9]], prompts, found)


def test_something_must_reward_completions(folder: Path) -> None:
    write_tool_task(folder)
    factory = f"{folder / 'games.py'}:Unrewarded"
    table = tool_grpo(folder, environment_factory=factory, reward_funcs=())
    tokenizer = open_initial_model(tool_job(folder, folder / "run", table)).reply_tokenizer
    with pytest.raises(ConfigError, match=r"there are no reward_funcs, and the environment .* has no get_reward"):
        CompletionRewards(table, tokenizer, UserModules(), games(folder, "Unrewarded"))
