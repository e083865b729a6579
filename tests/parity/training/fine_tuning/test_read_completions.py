"""Completions to be read after each evaluation: what transformers writes, the same under every plan, and no trace."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.models.reference_gradients import in_float64
from tests.support.selection import soak_but
from tests.support.training.post_training.policy_task import CONFIG, write_task
from tests.support.training.runs import final, records, train
from tllm.core.errors import ConfigError, PlanError
from tllm.spec.plan import Plan
from tllm.text.tokenizer import Tokenizer
from tllm.training.job.combinations import check_combination
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.policy.completions_file import EVAL_COMPLETIONS
from tllm.training.report import metrics
from tllm.training.report.events import RunEnded, RunStepped
from tllm.training.report.metrics import StepRecord

NEW_TOKENS = 6
PLANS = ("dp=2,zero=2,recompute=layer", "dp=5", "pp=2", "tp=2", "dp=2,pp=2,tp=2,schedule=zero_bubble")
Written = tuple[list[StepRecord], str]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    rows = [{"prompt": f"{count}=", "completion": "a" * count} for count in range(1, 7)]
    for name, some in (("rows", rows), ("held_out", rows[2:5])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def reading_job(task: Path, run: Path, /, **more: Any) -> Job:
    """Three prompts after steps 4 and 6 of six."""
    keys: dict[str, Any] = dict(
        config_name=str(task / "config.json"),
        tokenizer_name=str(task / "tokenizer.json"),
        train_files=(str(task / "rows.jsonl"),),
        eval_files=(str(task / "held_out.jsonl"),),
        output_dir=str(run),
        max_steps=6,
        seq_len=16,
        global_batch_size=6,
        learning_rate=1e-2,
        packing=False,
        save_steps=3,
        eval_steps=4,
        eval_num_prompts=3,
        eval_max_new_tokens=NEW_TOKENS,
        dtype="float64",
        mirror_steps=0,
    )
    return Job(**{**keys, **more})


def written(job: Job, plan: str) -> Written:
    return records(train(job, plan)), (Path(job.output_dir) / EVAL_COMPLETIONS).read_text()


def greedy(model: transformers.PreTrainedModel, ids: Sequence[int]) -> tuple[list[int], bool]:
    """What transformers writes, without the token that ends it; and whether it was cut off."""
    prompt = torch.tensor([list(ids)])
    with in_float64(model):
        out_T = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )[0]
    new = out_T[len(ids) :].tolist()
    return [id_ for id_ in new if id_], 0 not in new


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, Path]:
    run = tmp_path_factory.mktemp("alone") / "run"
    return written(reading_job(task, run), "pp=1"), run


def check_last(lines: Sequence[str], model: transformers.PreTrainedModel, tokenizer: Tokenizer) -> None:
    """The last evaluation is of the finished model."""
    for line in lines:
        told = json.loads(line)
        ids, is_truncated = greedy(model, tokenizer.encode(told["prompt"]))
        assert (told["completion"], told["truncated"]) == (tokenizer.decode(ids), is_truncated)


def test_the_completions_are_those_that_transformers_writes(alone: tuple[Written, Path], task: Path) -> None:
    (_, text), run = alone
    told = [json.loads(line) for line in text.splitlines()]
    assert [(one["step"], one["prompt"]) for one in told] == [(s, p) for s in (4, 6) for p in ("3=", "4=", "5=")]
    assert [one["reference"] for one in told[:3]] == ["aaa", "aaaa", "aaaaa"]
    assert told[0]["rewards"] is None is told[0]["reward"]
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float64)
    tokenizer = Tokenizer.from_folder(task)
    assert tokenizer is not None
    check_last(text.splitlines()[3:], model, tokenizer)


@pytest.mark.parametrize("plan", soak_but(PLANS[1:3], PLANS))
def test_every_plan_writes_the_same_file(plan: str, alone: tuple[Written, Path], task: Path, tmp_path: Path) -> None:
    (want, text), _ = alone
    got, same = written(reading_job(task, tmp_path / "run"), plan)
    assert same == text
    assert max(abs(one.loss - other.loss) for one, other in zip(got, want, strict=True)) < 1e-12


@pytest.mark.parametrize("keys", [{}, {"delay_steps": 1}, {"deterministic": True}], ids=str)
def test_nothing_that_is_learned_changes(keys: dict[str, Any], task: Path, tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for number in (0, 2):
        run = tmp_path / str(number)
        train(reading_job(task, run, eval_num_prompts=number, **keys), "dp=2")
        found.append(final(run))
        assert (run / EVAL_COMPLETIONS).exists() == bool(number)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_run_that_goes_on_has_each_line_once(alone: tuple[Written, Path], task: Path, tmp_path: Path) -> None:
    """It is stopped after the evaluation of step 4 and goes on from a save before it, as after a kill."""
    job, steps = reading_job(task, tmp_path / "run"), itertools.count(1)
    news = train(job, "pp=1", lambda: next(steps) >= 5)
    assert [one.step for one in news if isinstance(one, RunEnded)] == [5]
    for path in (tmp_path / "run" / "step-5").iterdir():
        path.unlink()
    (tmp_path / "run" / "step-5").rmdir()
    assert [one.step for one in records(train(job, "tp=2"))] == [4, 5, 6]
    assert (tmp_path / "run" / EVAL_COMPLETIONS).read_text() == alone[0][1]


def test_an_adapter_is_asked_and_not_the_model_beside_it(task: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    torch.manual_seed(3)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    made.save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_text((task / name).read_text())
    more: dict[str, Any] = dict(model_name_or_path=str(base), config_name=None, tokenizer_name=None)
    lora = LoraJob(r=4, lora_alpha=16.0, lora_dropout=0.1)
    _, text = written(reading_job(task, tmp_path / "run", lora=lora, learning_rate=0.1, **more), "dp=2")
    adapted = PeftModel.from_pretrained(made.double(), tmp_path / "run" / "final").merge_and_unload()
    tokenizer = Tokenizer.from_folder(task)
    assert tokenizer is not None
    check_last(text.splitlines()[3:], adapted, tokenizer)
    plain = [tokenizer.decode(greedy(AutoModelForCausalLM.from_pretrained(base), tokenizer.encode("3="))[0])]
    assert plain != [json.loads(text.splitlines()[3])["completion"]], "the base would have said the same"


class Writer:
    """Stands in for TensorBoard's own, which is not always installed."""

    texts: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.texts.clear()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert isinstance(value, float | int)

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))

    def close(self) -> None: ...


def test_they_are_told_to_who_follows_the_run_and_to_tensorboard(
    alone: tuple[Written, Path], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_summary_writer", lambda: Writer)
    news = train(reading_job(task, tmp_path / "run", report_to=("tensorboard",)), "pp=2")
    told = {one.record.step: one.completions for one in news if isinstance(one, RunStepped)}
    want = [json.loads(line) for line in alone[0][1].splitlines()]
    assert {step: len(some) for step, some in told.items()} == {1: 0, 2: 0, 3: 0, 4: 3, 5: 0, 6: 3}
    assert [one.completion for step in (4, 6) for one in told[step]] == [one["completion"] for one in want]
    assert [(name, step) for name, _, step in Writer.texts] == [("eval/completions", 4), ("eval/completions", 6)]
    shown = Writer.texts[0][1].split("\n\n")
    assert shown[:6] == ["**prompt**", "    3=", "**completion**", f"    {want[0]['completion']}", *shown[4:6]]
    assert shown[4:6] == ["**reference**", "    aaa"]


@pytest.mark.parametrize(
    ("task_name", "row"),
    [
        ("dpo", {"prompt": "2=", "chosen": "aa", "rejected": "ab"}),
        ("kto", {"prompt": "2=", "completion": "aa", "label": True}),
        ("orpo", {"prompt": "2=", "chosen": "aa", "rejected": "b"}),
    ],
)
def test_preferences_are_asked_their_prompts(task_name: str, row: dict[str, Any], task: Path, tmp_path: Path) -> None:
    other = {**row, "prompt": "3="}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n" * 2)
    files: dict[str, Any] = dict(train_files=(str(rows),), eval_files=(str(rows),), global_batch_size=2)
    job = reading_job(task, tmp_path / "run", task=task_name, max_steps=2, eval_num_prompts=2, **files)
    _, text = written(job, "dp=2")
    told = [json.loads(line) for line in text.splitlines()]
    assert [(one["step"], one["prompt"], one["reference"]) for one in told] == [(2, "2=", "aa"), (2, "3=", "aa")]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"eval_files": ()}, "eval_num_prompts is 3 and eval_files is empty"),
        ({"task": "reward", "eval_files": ("a",)}, "eval_num_prompts is 3 and a reward model writes nothing"),
        ({"eval_max_new_tokens": 16}, "eval_max_new_tokens is 16 and seq_len is 16"),
        ({"seq_len": 65}, "seq_len is 65 and the model's context 64"),
    ],
)
def test_what_cannot_be_completed_is_refused(keys: dict[str, Any], says: str, task: Path, tmp_path: Path) -> None:
    job = reading_job(task, tmp_path / "run", **keys)
    spec = open_initial_model(job).spec
    with pytest.raises(ConfigError, match=says):
        check_combination(job, Plan.parse("pp=1", spec.num_layers), spec)


@pytest.mark.parametrize("plan", ["cp=2", "dp=2,zero=3", "pp=1,chunks=2", "tp=2,sequence=true"])
def test_plans_that_cannot_sample_are_refused_by_name(plan: str, task: Path, tmp_path: Path) -> None:
    job = reading_job(task, tmp_path / "run")
    spec = open_initial_model(job).spec
    with pytest.raises(PlanError, match=r"eval_num_prompts=3 and .* in the plan"):
        check_combination(job, Plan.parse(plan, spec.num_layers), spec)


def test_fewer_rows_than_prompts_are_refused_before_the_first_step(task: Path, tmp_path: Path) -> None:
    job = reading_job(task, tmp_path / "run", eval_num_prompts=4)
    with pytest.raises(ConfigError, match="eval_num_prompts is 4 and of the 3 rows of eval_files 3 have a prompt"):
        train(job, "pp=1")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
