"""Runs whose completions have environments: a plain loop, other plans and machines, runs that stopped."""

from __future__ import annotations

import asyncio
import inspect
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.selection import soak_but
from tests.support.training.post_training.plain_tools import functions_of, plain_completion, watch
from tests.support.training.post_training.rollout_servers import sampling
from tests.support.training.post_training.teachers import address_of
from tests.support.training.post_training.told_runs import Told, check_same_run, told
from tests.support.training.post_training.tool_task import tool_grpo, tool_job, tool_keys, write_tool_task
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import RejectionConfig

DEEP = "dp=2,pp=2,tp=2,zero=1,schedule=zero_bubble"
DESK = '''
"""A desk that knows what was looked up and added before."""

import asyncio


class Desk:
    def reset(self, number, **row):
        self.words, self.total = [], number
        return f" from {number}!" if number else None

    def look(self, key: str) -> str:
        """Look a word up, after all that were before.

        Args:
            key: The word.
        """
        self.words.append({"a": "x", "b": "more"}[key])
        return " ".join(self.words)

    async def add(self, a: int, b: int) -> int:
        """Add two numbers to the sum so far.

        Args:
            a: The first.
            b: The second.
        """
        await asyncio.sleep(0)
        self.total += a + b
        return self.total

    def get_reward(self):
        return len(self.words) - self.total / 20


def added(environments, number, **columns):
    """How much was added since the beginning."""
    return [(one.total - began) / 10 for one, began in zip(environments, number, strict=True)]
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_tool_task(folder)
    (folder / "desk.py").write_text(DESK)
    rows = (folder / "prompts.jsonl").read_text().splitlines()
    (folder / "held_out.jsonl").write_text("\n".join(rows[2:]) + "\n")
    return folder


def keys(task: Path) -> dict[str, Any]:
    desk = f"{task / 'desk.py'}:"
    return {**tool_keys(task), "tools": (), "reward_funcs": (desk + "added",), "environment_factory": desk + "Desk"}


def grpo_job(task: Path, run: Path, **more: Any) -> Job:
    held_out = dict(eval_files=(str(task / "held_out.jsonl"),), eval_steps=2)
    return tool_job(task, run, tool_grpo(task, **keys(task), **more), max_steps=2, **held_out)


def rejection_job(task: Path, run: Path, **more: Any) -> Job:
    return tool_job(task, run, RejectionConfig(**keys(task), keep=2, temperature=1.2), **more)


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told(grpo_job(task, tmp_path_factory.mktemp("alone") / "run"), "pp=1")


def test_a_run_is_the_plain_loop(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given what was sampled: the same prompts, calls, results and rewards of each completion."""
    seen, job = watch(monkeypatch), rejection_job(task, tmp_path / "run", max_steps=2)
    got = records(train(job, "pp=1"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(task)
    assert len(lines) == len(seen.turns) == 32
    calls = 0
    for line, turns in zip(lines, seen.turns.values(), strict=True):
        number = int(line["prompt"][0]["content"][0])
        began = f"{number}? from {number}!" if number else "0?"
        assert line["prompt"] == [{"role": "user", "content": began}]
        text = tokenizer.decode(turns[0][0])
        assert text == f"[add][look]<user>{began}<end>\n<assistant>"
        desk = functions_of(task / "desk.py")["Desk"]()
        desk.reset(number=number)
        made = plain_completion({"look": desk.look, "add": awaited(desk.add)}, tokenizer, turns, 160)
        contents = [(one["role"], one["content"]) for one in line["completion"]]
        assert contents == [(one["role"], one["content"]) for one in made.messages]
        assert line["rewards"] == {"added": (desk.total - number) / 10, "Desk": desk.get_reward()}
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()), abs=1e-12)
        calls += made.calls
    assert sum((record.metrics or {})["tools/call_frequency"] for record in got) == pytest.approx(calls / 16)
    assert max(desk_calls(line) for line in lines) > 2, "a state that several calls have changed"


def desk_calls(line: dict[str, Any]) -> int:
    return sum("error" not in one["content"] for one in line["completion"] if one["role"] == "tool")


def awaited(method: Any) -> Any:
    assert inspect.iscoroutinefunction(method)
    return lambda **arguments: asyncio.run(method(**arguments))


@pytest.mark.parametrize("plan", soak_but(["pp=2,tp=2"], ["dp=5", "pp=2,tp=2", "dp=2,zero=2", DEEP]))
def test_every_plan_is_one_process(plan: str, task: Path, alone: Told, tmp_path: Path) -> None:
    """Also the evaluation. `test_tool_runs` has eight ranks, and the run below two replicas."""
    check_same_run(told(grpo_job(task, tmp_path / "run"), plan), alone)
    evaluated = [one.eval_metrics for one in alone[0]]
    assert evaluated[0] is None and evaluated[1] is not None and evaluated[1]["tools/call_frequency"] > 0.2
    assert "rewards/Desk/mean" in evaluated[1]


@pytest.mark.soak  # in the suite `test_turns_ahead` has both
def test_servers_elsewhere_sample_for_environments_here(task: Path, alone: Told, tmp_path: Path) -> None:
    secret = tmp_path / "rollout.key"
    with ExitStack() as stack:
        servers = [stack.enter_context(sampling(task, secret)) for _ in range(2)]
        elsewhere = dict(rollout_servers=tuple(map(address_of, servers)), rollout_secret=str(secret))
        check_same_run(told(grpo_job(task, tmp_path / "run", **elsewhere), "dp=2"), alone)


def test_a_run_that_goes_on_begins_its_environments_anew(task: Path, tmp_path: Path) -> None:
    want = told(rejection_job(task, tmp_path / "whole", max_steps=2), "pp=1")
    job = rejection_job(task, tmp_path / "run", max_steps=2)
    train(job, "pp=1", lambda: True)
    records(train(job, "dp=2"))
    assert (tmp_path / "run" / "completions.jsonl").read_text() == want[2]
    off, where = furthest(final(tmp_path / "run"), want[1])
    assert off < 1e-11, where
