"""Runs whose completions have several turns with tools: a plain loop, every plan, runs that stopped, exact ratios."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.house.tree import ROOT
from tests.support.selection import pairs_in_turn, soak_but
from tests.support.training.post_training.plain_tools import (
    PlainCompletion,
    plain_advantages,
    plain_completion,
    plain_steps,
    tools_of,
    watch,
)
from tests.support.training.post_training.rollout_servers import sampling
from tests.support.training.post_training.teachers import address_of
from tests.support.training.post_training.told_runs import Told, check_same_run, told
from tests.support.training.post_training.tool_task import tool_grpo, tool_job, tool_keys, write_tool_task
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.training.job.job import Job
from tllm.training.job.job_file import read_job
from tllm.training.job.rollout_keys import RejectionConfig
from tllm.training.objectives.rollout_correction import DIFFERENCE, RATIO
from tllm.training.policy import rewarded_rows
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.policy.rollouts import Completion
from tllm.training.report.metrics import read_records

PLANS = ("dp=5", "pp=2", "tp=2", "dp=2,zero=2,recompute=layer", "dp=2,pp=2,tp=2,zero=1,schedule=zero_bubble")

LEARNED = '''
def right(completions, number, **columns):
    """1 for one call, which is the one that the number asks for, and a turn without calls after it."""
    found = []
    for turns, which in zip(completions, number, strict=True):
        calls = [call["function"] for one in turns for call in one.get("tool_calls", [])]
        wanted = {"name": "look", "arguments": {"key": "a" if which % 2 else "b"}}
        found.append(float(calls == [wanted] and len(turns) == 3))
    return found
'''
"""Rewards of the task that a model learns."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_tool_task(folder)
    return folder


def grpo_job(task: Path, run: Path, **more: Any) -> Job:
    """With a reference, and two steps on the same completions."""
    return tool_job(task, run, tool_grpo(task, beta=0.1, num_iterations=2), **more)


def rejection_job(task: Path, run: Path, **more: Any) -> Job:
    return tool_job(task, run, RejectionConfig(**tool_keys(task), keep=2, temperature=1.2), **more)


JOBS = {"grpo": grpo_job, "rejection": rejection_job}


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Each task's run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: told(job(task, folder / name), "pp=1") for name, job in JOBS.items()}


def test_a_run_is_the_plain_loop(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given what was sampled: the same calls, results, tokens, masks, messages, metrics, losses and weights."""
    seen, learned = watch(monkeypatch), list[Completion]()
    right = rewarded_rows.completion_row

    def row(prompt_ids: Any, completion: Completion, **more: Any) -> Any:
        learned.append(completion)
        return right(prompt_ids, completion, **more)

    monkeypatch.setattr(rewarded_rows, "completion_row", row)
    job = grpo_job(task, tmp_path / "run")
    got = records(train(job, "pp=1"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(task)
    made = [plain_completion(tools_of(task), tokenizer, turns, 160) for turns in seen.turns.values()]
    assert len(made) == len(learned) == 32
    for ours, plain in zip(learned, made, strict=True):
        assert ours.turns is not None and list(ours.ids) == plain.ids and list(ours.turns.tool_mask) == plain.mask
        assert [plainly(message) for message in ours.turns.messages] == plain.messages
        assert (ours.turns.num_calls, ours.turns.num_failures) == (plain.calls, plain.failures)
        assert all(own or not told for own, told in zip(plain.mask, ours.log_probs, strict=True))
    assert max(len(turns) for turns in seen.turns.values()) > 3 and sum(one.failures for one in made) > 0
    check_metrics([record.metrics or {} for record in got[::2]], made)
    model = transformers.AutoModelForCausalLM.from_pretrained(task, dtype=torch.float64)
    groups = [(part, plain_advantages(task, part, 4, ("found", "short"))) for part in (made[:16], made[16:])]
    want = plain_steps(job, model, groups)
    assert max(abs(one.loss - other) for one, other in zip(got, want, strict=True)) < 1e-9
    assert len({round(loss, 6) for loss in want}) == 4
    trained = {name: x for name, x in model.state_dict().items() if name in final(tmp_path / "run")}
    off, where = furthest(final(tmp_path / "run"), trained)
    assert off < 1e-9, where


def test_a_task_that_is_to_be_learned_is_the_plain_loop(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of `test_a_model_learns_which_tool_to_call`: rewards of 0 and 1 that hang on another column of the row, most
    groups with one or none that is right, whose advantages are several, or 0; prompts computed once for eight."""
    write_tool_task(tmp_path / "task")
    (tmp_path / "task" / "rewards.py").write_text(LEARNED)
    seen = watch(monkeypatch)
    table = tool_grpo(
        tmp_path / "task",
        reward_funcs=(f"{tmp_path / 'task' / 'rewards.py'}:right",),
        num_generations=8,
        max_num_seqs=48,
    )
    sizes: dict[str, Any] = dict(global_batch_size=48, microbatch_size=12, max_steps=3, learning_rate=5e-3)
    got = records(train(job := tool_job(tmp_path / "task", tmp_path / "run", table, **sizes), "pp=1"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(task)
    made = [plain_completion(tools_of(task), tokenizer, turns, 160) for turns in seen.turns.values()]
    steps = [made[start : start + 48] for start in (0, 48, 96)]
    assert len(made) == 144
    groups = []
    for record, part in zip(got, steps, strict=True):
        right = torch.tensor([is_right(one, tokenizer) for one in part], dtype=torch.float64).view(-1, 8)
        assert (record.metrics or {})["rewards/right/mean"] == pytest.approx(float(right.mean()))
        off = right - right.mean(1, keepdim=True)
        groups.append((part, (off / (right.std(1, keepdim=True) + 1e-4)).flatten()))
    every = torch.cat([found for _, found in groups]).view(-1, 8)
    assert 0 < int((every == 0).all(1).sum()) < len(every) and float(every.max()) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "task", dtype=torch.float64)
    want = plain_steps(job, model, groups)
    assert max(abs(one.loss - other) for one, other in zip(got, want, strict=True)) < 1e-9
    trained = {name: x for name, x in model.state_dict().items() if name in final(tmp_path / "run")}
    off, where = furthest(final(tmp_path / "run"), trained)
    assert off < 1e-9, where


def is_right(one: PlainCompletion, tokenizer: Any) -> bool:
    """What `LEARNED` says of a completion of the loop."""
    (number,) = re.findall(r"(\d)\?", tokenizer.decode(one.prompt_ids))
    wanted = {"name": "look", "arguments": {"key": "a" if int(number) % 2 else "b"}}
    return len(one.messages) == 3 and [call for m in one.messages for call in m.get("tool_calls", [])] == [wanted]


def plainly(message: dict[str, Any]) -> dict[str, Any]:
    """A message without ids of calls, and with calls as the model writes them."""
    plain = {key: value for key, value in message.items() if key != "tool_call_id"}
    if "tool_calls" in message:
        assert all(call["type"] == "function" and len(call["id"]) == 9 for call in message["tool_calls"])
        plain["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return plain


def check_metrics(metrics: list[dict[str, float]], made: list[PlainCompletion]) -> None:
    for step, part in zip(metrics, (made[:16], made[16:]), strict=True):
        calls, lengths = sum(one.calls for one in part), [sum(one.mask) for one in part]
        assert step["tools/call_frequency"] == calls / 16
        assert step["tools/failure_frequency"] == sum(one.failures for one in part) / calls
        assert step["completions/mean_length"] == sum(lengths) / 16, "what tools wrote is not counted"
        assert step["completions/max_length"] == max(lengths)


@pytest.mark.parametrize(("name", "plan"), pairs_in_turn(JOBS, PLANS, 1))
def test_every_plan_is_one_process(plan: str, name: str, task: Path, alone: dict[str, Told], tmp_path: Path) -> None:
    check_same_run(told(JOBS[name](task, tmp_path / "run"), plan), alone[name])
    assert '"role":"tool"' in alone[name][2]


def test_servers_elsewhere_sample_every_turn(task: Path, alone: dict[str, Told], tmp_path: Path) -> None:
    """Also a server that has its first question of a step in a later turn."""
    secret = tmp_path / "rollout.key"
    with ExitStack() as stack:
        servers = [stack.enter_context(sampling(task, secret)) for _ in range(3)]
        elsewhere = dict(rollout_servers=tuple(map(address_of, servers)), rollout_secret=str(secret))
        rollouts = tool_grpo(task, beta=0.1, num_iterations=2, **elsewhere)
        got = told(tool_job(task, tmp_path / "run", rollouts), "dp=2")
    check_same_run(got, alone["grpo"])
    assert '"role":"tool"' in got[2]
    for metrics in (record.metrics or {} for record in got[0]):
        assert metrics["rollout/weight_bytes"] > 0 and metrics["rollout/questions_asked_again"] == 0


@pytest.mark.parametrize("name", soak_but(["grpo"], JOBS))
def test_a_run_that_goes_on_is_one_that_never_stopped(
    name: str, task: Path, alone: dict[str, Told], tmp_path: Path
) -> None:
    job = JOBS[name](task, tmp_path / "run", save_steps=4)
    train(job, "pp=1", lambda: True)
    records(train(job, "dp=2"))
    want, tensors, completions = alone[name]
    assert (tmp_path / "run" / COMPLETIONS).read_text() == completions
    whole = read_records(tmp_path / "run" / "metrics.jsonl")
    assert max(abs(a.loss - b.loss) for a, b in zip(whole, want, strict=True)) < 1e-12
    off, where = furthest(final(tmp_path / "run"), tensors)
    assert off < 1e-11, where


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run in one process, and the task, whose model has heads of sixteen numbers."""
    folder = tmp_path_factory.mktemp("exact")
    write_tool_task(folder / "task", head_dim=16)
    exact_run(folder / "task", folder / "run", "pp=1")
    return folder


def exact_run(task: Path, run: Path, plan: str) -> None:
    """In float32; every ratio of its first passes is 1."""
    for record in records(train(tool_job(task, run, dtype="float32", deterministic=True, max_steps=2), plan)):
        metrics = record.metrics or {}
        assert metrics["tools/call_frequency"] > 0.2
        assert metrics[f"{DIFFERENCE}/max"] == 0
        assert metrics[f"{RATIO}/min"] == metrics[f"{RATIO}/max"] == 1


@pytest.mark.parametrize("plan", soak_but(["dp=2,zero=1"], ["pp=2", "dp=2,zero=1"]))
def test_ratios_are_one_in_later_turns_too(plan: str, exact: Path, tmp_path: Path) -> None:
    """With `deterministic = true`, though a later turn's prompt is computed otherwise than it was written."""
    exact_run(exact / "task", tmp_path / "run", plan)
    assert (tmp_path / "run" / COMPLETIONS).read_bytes() == (exact / "run" / COMPLETIONS).read_bytes()
    mine, others = final(tmp_path / "run"), final(exact / "run")
    assert all(torch.equal(mine[name], others[name]) for name in others)


@pytest.mark.parametrize("plan", soak_but(["dp=2", "pp=2"], ["pp=1", "dp=2", "pp=2"]))
def test_a_turns_prompt_is_not_computed_again(
    plan: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's counters: of a later turn's prompt all full pages of what was there before are in the cache."""
    seen = watch(monkeypatch)
    train(tool_job(task, tmp_path / "run", max_steps=2), plan)
    later = 0
    for seed, turns in seen.turns.items():
        for number, (before, _) in enumerate(turns[1:], 1):
            known = turns[number - 1]
            computed = len(known[0]) + len(known[1]) - 1  # the last token was given out and never computed
            assert seen.cached[seed][number] == computed // 16 * 16 <= len(before)
            later += 1
    assert later > 10


def test_evaluations_have_turns_too(task: Path, tmp_path: Path) -> None:
    rows = (task / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows[2:]) + "\n")
    keys: dict[str, Any] = dict(eval_files=(str(tmp_path / "held_out.jsonl"),), eval_steps=2, max_steps=2)
    lines = []
    for number, plan in enumerate(("pp=1", "dp=2")):
        (metrics,) = [
            one.eval_metrics
            for one in records(train(tool_job(task, tmp_path / str(number), **keys), plan))
            if one.eval_metrics is not None
        ]
        assert metrics["tools/call_frequency"] > 0.2
        lines.append((tmp_path / str(number) / "eval_completions.jsonl").read_text())
    assert lines[0] == lines[1]
    roles = [[one["role"] for one in json.loads(line)["completion"]] for line in lines[0].splitlines()]
    assert ["assistant", "tool"] in [each[:2] for each in roles]


@pytest.mark.parametrize("plan", soak_but(["dp=2"], ["pp=1", "dp=2"]))
def test_a_tool_that_hangs_costs_no_step(plan: str, alone: dict[str, Told], tmp_path: Path) -> None:
    folder = tmp_path / "task"
    write_tool_task(folder)
    right = (folder / "tools.py").read_text()
    hanging = '    import time\n\n    calls.append(1)\n    if len(calls) > 8:\n        time.sleep(30)\n    return {"a"'
    (folder / "tools.py").write_text("calls = []\n" + right.replace('    return {"a"', hanging))
    table = tool_grpo(folder, beta=0.1, num_iterations=2, reward_timeout=1.0)
    job = tool_job(folder, tmp_path / "run", table, save_steps=4)
    with pytest.raises(
        ConfigError, match=r"the tool look of tools\.py has not returned: the calls of one turn have 1 s"
    ):
        train(job, plan)
    (folder / "tools.py").write_text(right)
    train(job, plan)
    off, where = furthest(final(tmp_path / "run"), alone["grpo"][1])
    assert off < 1e-11, where


def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    """Its files as they stand there, with a model of the test's and in fewer tokens."""
    write_tool_task(tmp_path)
    page = (ROOT / "docs" / "guides" / "rewards.md").read_text().partition("## Let the model call tools\n")[2]
    blocks = re.findall(r"```(?:python|json|toml)\n(?:# ([\w.]+)\n)?(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    for name, text in blocks:
        (tmp_path / (name or "prompts.jsonl")).write_text(text)
    assert [name for name, _ in blocks] == ["tools.py", "rewards.py", "", "job.toml"]
    sets = [
        f"model_name_or_path={tmp_path}",
        f"train_files={tmp_path / 'prompts.jsonl'}",
        f"output_dir={tmp_path / 'run'}",
    ]
    smaller = ["max_steps=2", "save_steps=2", "seq_len=192", "grpo.max_completion_length=160"]
    job = read_job(tmp_path / "job.toml", [*sets, *smaller]).job
    for record in records(train(job, "pp=1")):
        metrics = record.metrics or {}
        assert metrics["tools/call_frequency"] > 0.2 and 0 < metrics["rewards/looked/mean"] < 1


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_model_learns_which_tool_to_call(tmp_path: Path) -> None:
    """From one in thirty to one in three: `0?`, `2?` and `4?` are to be answered by one call, the others by another,
    and then by a turn without any. Calls that fail all but cease. About a minute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write_tool_task(tmp_path)
    (tmp_path / "rewards.py").write_text(LEARNED)
    table = tool_grpo(tmp_path, reward_funcs=(f"{tmp_path / 'rewards.py'}:right",), num_generations=16, max_num_seqs=96)
    job = tool_job(
        tmp_path,
        tmp_path / "run",
        table,
        dtype="float32",
        global_batch_size=96,
        microbatch_size=48,
        max_steps=60,
        save_steps=60,
        learning_rate=5e-3,
    )
    try:
        found = [record.metrics or {} for record in records(train(job, "pp=1"))]
    finally:
        torch.set_num_threads(threads)
    right = [metrics["rewards/right/mean"] for metrics in found]
    failed = [metrics["tools/failure_frequency"] for metrics in found]
    print("seed", job.seed, "right", [round(one, 2) for one in right], "failed", [round(one, 2) for one in failed])
    assert sum(right[:5]) / 5 < 0.05 and sum(right[-5:]) / 5 > 0.3
    assert sum(failed[:5]) / 5 > 0.4 and sum(failed[-5:]) / 5 < 0.1
