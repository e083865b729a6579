"""Turns of completions with tools, over a model that says what it is told: when they end, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.post_training.tool_task import CALLS, tool_grpo, tool_job, write_tool_task
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.encoder import IGNORED
from tllm.training.job.initial_model import spec_of
from tllm.training.policy.completion_rewards import length_metrics, tool_metrics
from tllm.training.policy.rewarded_rows import completion_row
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder
from tllm.training.policy.sample_together import dealt
from tllm.training.policy.tool_turns import Tools, make_sampler
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.tools.user_functions import UserModules

LOOK, _, ADD, FAILS = CALLS[:4]
Script = dict[int, list[str]]
"""The turns of each completion by its seed. One that ends with a full stop is cut off there."""


class ScriptedRollouts:
    """`Rollouts` that say the next turn of each completion, and note what they are asked."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self.tokenizer, self.script = tokenizer, {seed: list(turns) for seed, turns in script.items()}
        self.asked: list[tuple[list[PromptGroup], bool]] = []
        self.metrics: dict[str, float] = {}

    def share(self, order: RolloutOrder) -> Sequence[PromptGroup]:
        return order.groups[0]

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        self.asked.append((list(groups), sampling.goes_on))
        return [self._turn(group, seed, sampling) for group in groups for seed in group.seeds]

    def _turn(self, group: PromptGroup, seed: int, sampling: CompletionSampling) -> Completion:
        text = self.script[seed].pop(0)
        ids = self.tokenizer.encode(text, add_special_tokens=False) + ([] if text.endswith(".") else [0])
        ids = ids[: sampling.max_tokens if group.max_tokens is None else group.max_tokens]
        return Completion(tuple(ids), (-0.5,) * len(ids), ids[-1] != 0)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_tool_task(folder)
    return folder


def sampled(task: Path, script: Script, **keys: Any) -> tuple[list[Completion], ScriptedRollouts, RolloutOrder]:
    """The completions of one prompt, whose seeds are the script's."""
    tokenizer = Tokenizer.from_folder(task)
    assert tokenizer is not None
    table = tool_grpo(task, **{"max_completion_length": 100, **keys})
    job, rollouts = tool_job(task, task / "run", table), ScriptedRollouts(tokenizer, script)
    config = RankConfig(job, Plan.parse("pp=1", 2), spec_of(job), 0, Groups())
    tools = Tools(table, tokenizer, ChatTemplate.from_folder(task, tokenizer), UserModules())
    sampling = CompletionSampling(table.max_completion_length)
    sampler = make_sampler(config, rollouts, sampling, tools)
    prompt = tuple(tokenizer.encode("<user>?<end>\n<assistant>", add_special_tokens=False))
    order, completions = sampler(dealt([PromptGroup(prompt, tuple(script))], tokenizer.eos_ids, config.plan))
    return completions, rollouts, order


def roles(completion: Completion) -> str:
    """The turns by the first letters of their roles."""
    assert completion.turns is not None
    assert len(completion.turns.tool_mask) == len(completion.ids) == len(completion.log_probs)
    return "".join(message["role"][0] for message in completion.turns.messages)


def test_a_completion_goes_on_until_it_calls_nothing(task: Path) -> None:
    script = {1: [LOOK, "it is" + ADD + FAILS, "x1"], 2: ["none"], 3: [ADD, "three"]}
    completions, rollouts, _ = sampled(task, script)
    assert [roles(one) for one in completions] == ["atatta", "a", "ata"]
    first, second, third = completions
    assert first.turns is not None and second.turns is not None
    contents = [(message["role"], message["content"]) for message in first.turns.messages]
    assert contents[1:] == [
        ("tool", "x1"),
        ("assistant", "it is"),
        ("tool", "3"),
        ("tool", str({"error": "'c'"})),
        ("assistant", "x1"),
    ]
    results = [message for message in first.turns.messages if message["role"] == "tool"]
    assert [(one["name"], one["tool_call_id"]) for one in results] == [
        ("look", "call00001"),
        ("add", "call00002"),
        ("look", "call00003"),
    ]
    assert (first.turns.num_calls, first.turns.num_failures, second.turns.num_calls) == (3, 1, 0)
    assert tool_metrics(completions) == {"tools/call_frequency": 4 / 3, "tools/failure_frequency": 1 / 4}
    text = rollouts.tokenizer.decode(first.ids)
    assert text == (
        f"{LOOK}<end>\n<tool>x1<end>\n<assistant>it is{ADD}{FAILS}<end>\n"
        "<tool>3<end>\n<tool>{'error': \"'c'\"}<end>\n<assistant>x1<end>"
    )
    lengths = [one.num_sampled for one in completions]
    assert lengths == [2 + 8 + 3, 5, 2 + 6] and length_metrics(completions)["completions/mean_length"] == 26 / 3
    row = completion_row((5, 6), third, advantage=1.0)
    assert [label for label in row.labels.tolist() if label != IGNORED] == [
        token for token, own in zip(third.ids, third.turns.tool_mask if third.turns else (), strict=True) if own
    ]


def test_each_turn_is_asked_of_the_grown_ids_with_what_room_is_left(task: Path) -> None:
    (completion,), rollouts, _ = sampled(task, {7: [LOOK, ADD, "x"]})
    (first,), goes_on = rollouts.asked[0]
    assert not goes_on and first.max_tokens is None and len(rollouts.asked) == 3
    for groups, goes_on in rollouts.asked[1:]:
        (group,) = groups
        assert goes_on and group.seeds == (7,), "places differ, so that the same seed draws other tokens"
        grown = (*first.ids, *completion.ids)
        assert group.ids == grown[: len(group.ids)]
        assert group.max_tokens == 100 - (len(group.ids) - len(first.ids))


def test_turns_with_calls_are_as_many_as_the_job_says(task: Path) -> None:
    (completion,), rollouts, _ = sampled(task, {1: [LOOK, LOOK, LOOK, "x"]}, max_tool_calling_iterations=2)
    assert roles(completion) == "atata" and len(rollouts.script[1]) == 1 and not completion.is_truncated
    assert completion.turns is not None and completion.turns.num_calls == 2, "those of the last turn are not made"


SUFFIX = len("\n") + 1 + len("x1") + 1 + len("\n") + 1


@pytest.mark.parametrize(
    ("room", "written", "is_truncated"),
    [
        (2 + SUFFIX - 1, "a", False),  # the result has no room: the completion ends with its call
        (2 + SUFFIX, "at", True),  # it has just room, and nothing is left for the model
        (2 + SUFFIX + 1, "ata", True),
        (2 + SUFFIX + 3, "ata", False),
    ],
)
def test_results_count_in_the_length_of_a_completion(room: int, written: str, is_truncated: bool, task: Path) -> None:
    (completion,), _, _ = sampled(task, {1: [LOOK, "ok"]}, max_completion_length=room)
    assert roles(completion) == written and completion.is_truncated == is_truncated
    assert len(completion.ids) <= room and completion.turns is not None and completion.turns.num_calls == 1


def test_a_turn_that_was_cut_off_makes_no_call(task: Path) -> None:
    (completion,), _, _ = sampled(task, {1: [LOOK + "and so on."]})
    assert roles(completion) == "a" and completion.is_truncated
    assert completion.turns is not None and completion.turns.num_calls == 0


def test_a_tool_that_returns_no_text_is_the_orders_fault(task: Path, tmp_path: Path) -> None:
    write_tool_task(tmp_path)
    (tmp_path / "tools.py").write_text((task / "tools.py").read_text().replace("return a + b", "return {a, b}"))
    completions, _, order = sampled(tmp_path, {1: [ADD, "x"]})
    assert not completions and order.fault is not None
    assert order.fault[0] == "the tool add of tools.py returned a set, which is neither a text nor JSON"


def test_a_model_without_a_chat_template_has_no_tools(task: Path) -> None:
    tokenizer = Tokenizer.from_folder(task)
    assert tokenizer is not None
    with pytest.raises(ConfigError, match="the job has tools and the model has no chat template"):
        Tools(tool_grpo(task), tokenizer, None, UserModules())
