"""Reward functions of the user's: what they are given, and one clear line for each way in which they go wrong."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tllm.core.errors import ConfigError
from tllm.training.data.prompt_batches import PromptRow
from tllm.training.job.rollout_keys import GRPOConfig
from tllm.training.policy.completion_rewards import CompletionRewards
from tllm.training.policy.reward_functions import RewardFunction, load_reward_function
from tllm.training.policy.rollouts import Completion
from tllm.training.policy.started_prompts import StartedPrompts
from tllm.training.tools.user_functions import UserModules

ARGUMENTS = {"prompts": ["1=", "2="], "completions": ["a", "aa"], "completion_ids": [[1], [1, 1]], "count": [1, 2]}


def function(folder: Path, body: str, seconds: float = 5.0) -> RewardFunction:
    """The function `f` of a file with this body."""
    (folder / "of_test.py").write_text(f"def f(prompts, completions, count, **columns):\n    {body}\n")
    return load_reward_function(f"{folder / 'of_test.py'}:f", seconds, UserModules())


def test_a_function_sees_a_list_of_each_column_and_may_say_nothing(tmp_path: Path) -> None:
    f = function(tmp_path, "return [None, len(completions[1]) == count[1] and columns['completion_ids'][1][0]]")
    unsaid, said = f(ARGUMENTS)
    assert math.isnan(unsaid) and said == 1.0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1.0]", "returned 1 reward for 2 completions"),
        ("return 1.0", "returned a float"),
        ("return 'ab'", "returned a str"),
        ("return [1.0, float('nan')]", "returned nan for completion 1"),
        ("return [float('inf'), 1.0]", "returned inf for completion 0"),
        ("return [1.0, 'much']", "returned 'much' for completion 1"),
        ("return [1.0, [2.0]]", "for completion 1"),
        ("raise KeyError('gone')", "raised KeyError: 'gone'"),
        ("return {}[0]", "raised KeyError: 0"),
    ],
)
def test_what_is_no_list_of_numbers_is_told_in_one_line(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        function(tmp_path, body)(ARGUMENTS)
    assert f"the reward function f of of_test.py {words}" in caught.value.message or words in caught.value.message
    assert "\n" not in caught.value.message and caught.value.hint
    if "raised" in words:
        assert caught.value.hint == "of_test.py, line 2"


def test_all_functions_of_a_step_have_the_seconds_together(tmp_path: Path) -> None:
    """Else two that take 400 s each, of which none is late, end the run by the other ranks, which wait for 600 s."""
    slow = "def {}(prompts, **rest):\n    time.sleep({})\n    return [1.0]\n"
    (tmp_path / "slow.py").write_text("import time\n" + slow.format("f", 0.4) + slow.format("g", 0.9))
    table = GRPOConfig(reward_funcs=tuple(f"{tmp_path / 'slow.py'}:{name}" for name in "fg"), reward_timeout=1.0)
    tokenizer: Any = SimpleNamespace(eos_ids=(0,))
    rewards = CompletionRewards(table, tokenizer, UserModules())
    started = StartedPrompts([PromptRow((1,), {"prompt": "1="})], [7])
    with pytest.raises(ConfigError, match=r"the reward function g of slow\.py has not returned: .* have 1 s together"):
        rewards.of(started, [Completion((1,), (-1.0,), False)], ["a"])


def test_a_function_that_hangs_is_left_behind(tmp_path: Path) -> None:
    function(tmp_path, "pass")
    held = threading.Event()
    waits = RewardFunction("waits", tmp_path / "of_test.py", lambda **columns: held.wait(60), 0.05)
    with pytest.raises(
        ConfigError, match=r"waits of of_test.py has not returned: those of one step have 0\.05 s together"
    ):
        waits(ARGUMENTS)
    held.set()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("def f(completion):", r"is called with prompts, completions, completion_ids, and is f\(completion\)"),
        ("def f(prompts, completions):", r"and is f\(prompts, completions\)"),
        ("async def f(prompts, completions, **columns):", "is async"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_loaded(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "of_test.py").write_text(f"{line}\n    return [0.0, 0.0]\n")
    with pytest.raises(ConfigError, match=words) as caught:
        load_reward_function(f"{tmp_path / 'of_test.py'}:f", 20.0, UserModules())
    assert caught.value.hint == "write it as def f(prompts, completions, **columns)"


def test_a_column_that_rows_have_not_is_told_beside_those_that_they_have(tmp_path: Path) -> None:
    (tmp_path / "of_test.py").write_text("def f(prompts, completions, answer, **columns):\n    return [0.0, 0.0]\n")
    f = load_reward_function(f"{tmp_path / 'of_test.py'}:f", 20.0, UserModules())
    with pytest.raises(ConfigError, match=r"raised TypeError: .*'answer'") as caught:
        f(ARGUMENTS)
    assert caught.value.hint == "it is called with prompts, completions, completion_ids, count"


def test_a_file_is_found_run_and_asked_for_its_function(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_test.py").write_text("ONE = 1.0\n")
    (tmp_path / "of_test.py").write_text(
        "from neighbour_of_test import ONE\n\n\ndef f(completions, **columns):\n    return [ONE for _ in completions]\n"
    )
    assert load_reward_function(f"{tmp_path / 'of_test.py'}:f", 20.0, UserModules())(ARGUMENTS) == [1.0, 1.0]
    for text, words in (
        (f"{tmp_path / 'nowhere.py'}:f", "which is no file"),
        (f"{tmp_path / 'of_test.py'}:g", "has no function g"),
        (f"{tmp_path / 'of_test.py'}:ONE", "has no function ONE"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_reward_function(text, 20.0, UserModules())
    (tmp_path / "of_test.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(ConfigError, match="raised ModuleNotFoundError") as caught:
        load_reward_function(f"{tmp_path / 'of_test.py'}:f", 20.0, UserModules())
    assert caught.value.hint == "of_test.py, line 1"
