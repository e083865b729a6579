"""What a run may start from."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.training.post_training.policy_task import policy_job, write_task
from tests.support.training.post_training.preferences import (
    pair_rows,
    preference_job,
    small_model,
    some,
    text_of,
    unpaired_rows,
)
from tllm.api.trainer import Trainer
from tllm.core.errors import ConfigError
from tllm.planner.cost.flops import training_flops
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.plan import Plan
from tllm.training.data import choose_encoder
from tllm.training.data.batches import Batches
from tllm.training.data.packing import PackedRow
from tllm.training.job import initial_model
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.initial_model import open_initial_model, row_lengths, rows_held_out, rows_learned, spec_of
from tllm.training.job.job import Job
from tllm.training.job.job_parts import data_config, shares_prompts, training_facts
from tllm.training.job.preference_tables import KTOConfig


def test_a_mistyped_folder_is_told_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    named = str(tmp_path / "tinny")
    with pytest.raises(ConfigError, match=r"tinny is neither a model's folder nor a config.json") as caught:
        spec_of(Job(model_name_or_path=named, train_files=("a.txt",), output_dir="run", max_steps=1))
    assert caught.value.hint.startswith(f"did you mean {tmp_path / 'tiny'}? ")


def test_how_long_pairs_are_is_read_from_the_data_where_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word is a token; a reply ends with one more, which its last word predicts."""
    small_model("llama", tmp_path / "model")
    rows = pair_rows(tmp_path / "pairs.jsonl")
    job = preference_job(tmp_path / "model", tmp_path / "run", "dpo")

    def words(rows: list[dict[str, str]], *names: str) -> float:
        return fmean(len(row[name].split()) for row in rows for name in names)

    found = row_lengths(job)
    assert found is not None
    assert found[:3] == (words(rows, "prompt"), pytest.approx(words(rows, "chosen", "rejected") + 1), 2)
    monkeypatch.setattr(initial_model, "ROWS_READ", 8)
    few = row_lengths(job)
    assert few is not None and few.prompt == words(rows[::3], "prompt"), "of all parts of the file"
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "w1", "chosen": "w2"}) + "\n")
    monkeypatch.setattr(initial_model, "ROWS_READ", 100)
    assert row_lengths(job) is None, "the run tells what is wrong with it"
    for gone in ("model/tokenizer.json", "pairs.jsonl"):
        (tmp_path / gone).unlink()
        assert row_lengths(job) is None


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_unpaired_replies_are_counted_as_rows_have_them(loss_type: str, packing: bool, tmp_path: Path) -> None:
    """With and without a mismatched reply, which has a pass of its own, without gradients. What a run has in its
    rows, over some steps, is what is counted."""
    small_model("llama", tmp_path / "model")
    unpaired_rows(tmp_path / "unpaired.jsonl", 200)
    job = preference_job(
        tmp_path / "model", tmp_path / "run", "kto", packing=packing, kto=KTOConfig(loss_type=loss_type)
    )
    lengths = row_lengths(job)
    assert lengths is not None and lengths.parts == (2 if loss_type == "kto" else 1)
    facts = training_facts(job, lengths=lengths)
    check_counted(job, facts)
    spec, plan = spec_of(job), Plan.parse("pp=1", 4)
    assert facts.value_pass == (loss_type == "kto")
    assert replace(facts.as_large_as_may_be, value_pass=False) == training_facts(job), "there is room for whole rows"
    assert training_bytes(spec, plan, facts) == training_bytes(spec, plan, training_facts(job))


@pytest.mark.parametrize("packing", [False, True])
def test_scored_pairs_are_counted_as_rows_have_them(packing: bool, tmp_path: Path) -> None:
    """A conversation has a score of each token and no logits, and both of a pair are computed whole."""
    small_model("llama", tmp_path / "model")
    pair_rows(tmp_path / "pairs.jsonl", 200)
    job = preference_job(tmp_path / "model", tmp_path / "run", "reward", packing=packing)
    lengths, spec = row_lengths(job), spec_of(job)
    assert lengths is not None and lengths.parts == 2 and spec.num_labels == 1
    facts = training_facts(job, shares_prompts=shares_prompts(job, spec), lengths=lengths)
    rows = rows_of(job)
    assert facts.row_tokens == pytest.approx(fmean(len(row.labels) for row in rows), rel=0.12)
    assert not any((row.labels >= 0).any() for row in rows) and facts.predicted == sum(facts.lengths)
    computed = fmean(training_flops(spec, row.lengths) for row in rows)
    planned = training_flops(spec, facts.lengths, facts.predicted, before=facts.before) / facts.microbatch_size
    assert planned == pytest.approx(computed, rel=0.12)
    assert planned < 0.9 * training_flops(replace(spec, num_labels=0), (job.seq_len,))
    plan = Plan.parse("pp=1", spec.num_layers)
    assert training_bytes(spec, plan, facts) == training_bytes(spec, plan, training_facts(job))


def test_texts_that_are_rows_of_their_own_are_counted_as_long_as_they_are(tmp_path: Path) -> None:
    small_model("llama", tmp_path / "model")
    dice, path = random.Random(3), tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text_of(some(dice, 2, 20))}) + "\n" for _ in range(150)))
    job = preference_job(tmp_path / "model", tmp_path / "run", "sft", train_files=(str(path),))
    lengths = row_lengths(job)
    assert lengths is not None
    check_counted(job, training_facts(job, lengths=lengths))
    packed = replace(job, packing=True)
    lengths = row_lengths(packed)
    assert lengths is not None and 0.85 < lengths.fill < 1
    check_counted(packed, training_facts(packed, lengths=lengths))
    assert row_lengths(replace(packed, documents="stream")) is None, "one text fills every row"


def test_texts_that_are_cut_to_rows_count_once_for_each(tmp_path: Path) -> None:
    small_model("llama", tmp_path / "model")
    dice, path = random.Random(4), tmp_path / "texts.jsonl"
    job = preference_job(tmp_path / "model", tmp_path / "run", "sft", train_files=(str(path),))
    sizes = [2 if n % 2 else 5 * job.seq_len for n in range(100)]
    path.write_text("".join(json.dumps({"text": text_of(some(dice, size, size))}) + "\n" for size in sizes))
    check_counted(job, training_facts(job, lengths=row_lengths(job)))
    cut_off = row_lengths(replace(job, over_long="truncate"))
    assert cut_off is not None and cut_off.prompt + cut_off.reply < 0.7 * job.seq_len


def test_of_data_without_a_row_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mismatched reply is that of the row before, and of a large file with one row there is none."""
    small_model("llama", tmp_path / "model")
    unpaired_rows(tmp_path / "unpaired.jsonl", 1)
    job = preference_job(tmp_path / "model", tmp_path / "run", "kto", kto=KTOConfig())
    monkeypatch.setattr(choose_encoder, "READ_THROUGH", 0)
    assert row_lengths(job) is None


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("task", ["sft", "dpo", "kto", "reward"])
def test_rows_held_out_are_counted_as_an_evaluation_has_them(task: str, packing: bool, tmp_path: Path) -> None:
    small_model("llama", tmp_path / "model")
    (unpaired_rows if task == "kto" else pair_rows)(tmp_path / "held_out.jsonl", 150)
    if task == "sft":
        dice = random.Random(5)
        rows = ({"text": text_of(some(dice, 2, 60))} for _ in range(150))
        (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kto = KTOConfig() if task == "kto" else None
    job = preference_job(tmp_path / "model", tmp_path / "run", task, packing=packing, kto=kto)
    assert rows_held_out(job) is None
    job = replace(job, eval_files=(str(tmp_path / "held_out.jsonl"),))
    counted = rows_held_out(job)
    batches = open_initial_model(job).eval_batches(job)
    assert counted is not None and batches is not None
    found = [row for rows in steps_of(batches) for row in rows]
    assert counted.documents == 150
    assert counted.rows == pytest.approx(len(found), rel=0.05)
    facts = training_facts(job, lengths=counted.lengths)
    tokens = sum(len(row.labels) for row in found)
    assert counted.rows * (facts.row_tokens or job.seq_len) == pytest.approx(tokens, rel=0.1)


def steps_of(batches: Batches) -> Iterator[Sequence[PackedRow]]:
    """The rows of each step, until there are no more."""
    return takewhile(bool, map(batches.step, count()))


def test_a_reference_is_computed_once_for_each_row(tmp_path: Path) -> None:
    small_model("llama", tmp_path / "model")
    pair_rows(tmp_path / "pairs.jsonl", 24)
    job = preference_job(tmp_path / "model", tmp_path / "run", "dpo")
    lengths = row_lengths(job)
    found = [rows_learned(replace(job, max_steps=steps), lengths) for steps in (2, 3, 300)]
    assert [one.rows for one in found] == [16, 24, 24]
    assert [one.documents for one in found] == [24, 24, 24]


def test_files_that_are_too_large_to_be_read_through_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model("llama", tmp_path / "model")
    pair_rows(tmp_path / "pairs.jsonl", 24)
    files = (str(tmp_path / "pairs.jsonl"),)
    job = preference_job(tmp_path / "model", tmp_path / "run", "dpo", eval_files=files, max_steps=300)
    monkeypatch.setattr(choose_encoder, "READ_THROUGH", 100)
    assert rows_held_out(job) is None and rows_learned(job, row_lengths(job)) == (2400, 2400, row_lengths(job))


def rows_of(job: Job) -> list[PackedRow]:
    """Those of some steps."""
    batches = open_initial_model(job)._batches(data_config(job))
    return [row for step in range(12) for row in batches.step(step)]


def check_counted(job: Job, facts: TrainingFacts) -> None:
    """Tokens of a row and those that are predicted, in the run's own batches."""
    rows = rows_of(job)
    tokens, predicted = fmean(len(row.labels) for row in rows), fmean((row.labels >= 0).sum() for row in rows)
    learned = 0.5 if facts.value_pass else 1.0
    assert facts.row_tokens == pytest.approx(tokens, rel=0.12)
    assert sum(facts.lengths) / facts.microbatch_size == pytest.approx(learned * tokens, rel=0.12)
    assert facts.target_tokens == pytest.approx(learned * predicted, rel=0.15)


@pytest.mark.parametrize(
    ("task", "row", "message", "hint"),
    [
        ("dpo", {"text": "w1"}, "has no chosen", '"rejected"'),
        (
            "dpo",
            {"prompt": "w1", "chosen": "w2", "rejected": "w2"},
            "chosen and rejected are the same",
            "leave the row out",
        ),
        ("kto", {"prompt": "w1", "completion": "w2", "label": "yes"}, "label is 'yes'", "true or false"),
        ("sft", {"prompt": "w1", "response": "w2"}, r"keys \['prompt', 'response'\]", "completion"),
        ("sft", {"prompt": "w1", "chosen": "w2", "rejected": "w3"}, "is of no known form", "give task"),
    ],
)
def test_a_first_row_of_no_form_that_the_task_takes_is_named_before_anybody_is_waited_for(
    task: str, row: dict[str, str], message: str, hint: str, tmp_path: Path
) -> None:
    small_model("llama", tmp_path / "model")
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    job = replace(preference_job(tmp_path / "model", tmp_path / "run", "dpo"), task=task, dpo=None)
    with pytest.raises(ConfigError, match=rf"pairs\.jsonl, first row: .*{message}") as caught:
        Trainer(job_keys(job)).beginning  # noqa: B018 - it is what looks at the rows
    assert hint in caught.value.hint
    path.unlink()
    assert Trainer(job_keys(job)).beginning.spec.num_layers, "another machine may have the file"


@pytest.mark.parametrize("lmbda", [None, 0.5, 1.0], ids=["grpo", "some of its own", "all its own"])
def test_an_output_that_is_not_learned_is_told_before(
    lmbda: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_task(tmp_path)
    rows = tmp_path / "alpaca.jsonl"
    rows.write_text(json.dumps({"instruction": "1", "output": "a"}) + "\n")
    job = policy_job(tmp_path, tmp_path / "run", train_files=(str(rows),), seq_len=320)
    if lmbda is not None:
        taught = DistillationKeys(teacher_model_name_or_path="t", lmbda=lmbda, max_completion_length=8)
        job = replace(job, task="distill", grpo=None, distill=taught)
    open_initial_model(job).check_rows(job)
    told = [message for message in caplog.messages if "their output is not learned" in message]
    assert len(told) == (lmbda != 0.5) and all(str(rows) in message for message in told)


def job_keys(job: Job) -> dict[str, Any]:
    """The keys that a job gives, as a program gives them."""
    names = ("output_dir", "train_files", "max_steps", "task", "model_name_or_path", "seq_len")
    return {name: getattr(job, name) for name in names}
