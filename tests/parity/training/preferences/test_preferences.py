"""Runs that learn from preferences: each task against a plain loop over `transformers`, every plan against one process.

The loops are written from the papers. They were once compared with the package trl too: docs/log/preferences.md.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.support.models.reference_gradients import in_float64
from tests.support.selection import soak_but
from tests.support.training.post_training.preferences import (
    Replies,
    ids_of,
    learn,
    mean_over,
    pair_rows,
    preference_job,
    references,
    slow_dpo,
    small_model,
    unpaired_rows,
)
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.training.job.preference_tables import (
    DPO_LOSSES,
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
    SimPOConfig,
)
from tllm.training.report.metrics import StepRecord

TABLES: dict[str, dict[str, Any]] = {
    "dpo": {"dpo": DPOConfig(beta=0.3, ld_alpha=0.5)},
    "kto": {"kto": KTOConfig(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)},
    "orpo": {"orpo": ORPOConfig(beta=0.4)},
    "simpo": {"simpo": SimPOConfig(cpo_alpha=0.2)},
    "reward": {"reward": RewardConfig(center_rewards_coefficient=0.05)},
}
PLANS = (
    "dp=2",
    "dp=3:1",
    "pp=2",
    "tp=2",
    "tp=2,sequence=true",
    "cp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,pp=2,tp=2,zero=2,sequence=true,schedule=zero_bubble",
    "dp=2,pp=2,cp=2,recompute=layer",
)
MEET = (
    ("dpo", "dp=2,pp=2,cp=2,recompute=layer"),
    ("dpo", "dp=2,zero=3"),
    ("dpo", PLANS[-2]),
    ("orpo", "tp=2,sequence=true"),
    ("simpo", "dp=3:1"),
    ("kto", "cp=2"),
    ("kto", "dp=2,zero=3"),
    ("reward", "cp=2"),
    ("reward", PLANS[-2]),
)
"""What each task has code of its own for: tokens that are spread, of a head too. All make the same sums beside it.
With cp whole rows are computed, and elsewhere the prompts of pairs once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model") / "model"
    return folder, small_model("llama", folder, num_hidden_layers=2)


def in_double(
    source: transformers.PreTrainedModel, job: Any, rows: list[dict[str, Any]], names: tuple[str, ...], loss: Any
) -> tuple[list[float], transformers.PreTrainedModel]:
    """The plain loop, nothing of it in less than float64."""
    policy = copy.deepcopy(source)
    with in_float64(policy):
        return learn(job, policy, references(policy, rows, names), rows, loss), policy


def check(run: Path, got: list[StepRecord], want: list[float], policy: transformers.PreTrainedModel) -> None:
    assert max(abs(a.loss - b) / abs(b) for a, b in zip(got, want, strict=True)) < 1e-10
    named = {name: x for name, x in policy.state_dict().items() if name in final(run)}
    off, name = furthest(final(run), named)
    assert off < 1e-10, name


@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_dpo_is_the_plain_loop(loss_type: str, model: Any, tmp_path: Path) -> None:
    folder, truth = model
    smoothing = 0.1 if loss_type in ("robust", "exo_pair", "sigmoid") else 0.0
    config = DPOConfig(beta=0.3, loss_type=loss_type, label_smoothing=smoothing)
    job = preference_job(folder, tmp_path / "run", "dpo", dpo=config, max_steps=2, global_batch_size=4)
    got = records(train(job, "pp=1"))
    rows = pair_rows(tmp_path / "pairs.jsonl")
    loss = mean_over(lambda one: slow_dpo(one, loss_type, 0.3, smoothing))
    want, policy = in_double(truth, job, rows, ("chosen", "rejected"), loss)
    check(tmp_path / "run", got, want, policy)
    first = got[0].metrics or {}
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/margins"] == 0


def test_dpo_without_reference_and_with_less_weight_on_tails(model: Any, tmp_path: Path) -> None:
    folder, truth = model
    config = DPOConfig(beta=0.2, reference_free=True, ld_alpha=0.25)
    job = preference_job(folder, tmp_path / "run", "dpo", dpo=config, max_steps=2)
    got = records(train(job, "pp=1"))
    rows = pair_rows(tmp_path / "pairs.jsonl")

    def loss(one: Replies) -> Tensor:
        shared = min(len(x_T) for x_T in one.log_probs.values())
        won, lost = (one.log_probs[name] for name in ("chosen", "rejected"))
        won, lost = (x_T[:shared].sum() + 0.25 * x_T[shared:].sum() for x_T in (won, lost))
        return -logsigmoid(0.2 * (won - lost))

    want, policy = in_double(truth, job, rows, ("chosen", "rejected"), mean_over(loss))
    check(tmp_path / "run", got, want, policy)
    assert not (tmp_path / "run" / "reference.safetensors").exists()


def test_orpo_is_the_plain_loop(model: Any, tmp_path: Path) -> None:
    folder, truth = model
    job = preference_job(folder, tmp_path / "run", "orpo", **TABLES["orpo"])
    got = records(train(job, "pp=1"))

    def loss(one: Replies) -> Tensor:
        chosen, rejected = (one.log_probs[name].mean().exp() for name in ("chosen", "rejected"))
        odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
        return -chosen.log() - 0.4 * torch.sigmoid(odds.log()).log()

    rows = pair_rows(tmp_path / "pairs.jsonl")
    want, policy = in_double(truth, job, rows, ("chosen", "rejected"), mean_over(loss))
    check(tmp_path / "run", got, want, policy)


def test_simpo_is_the_plain_loop(model: Any, tmp_path: Path) -> None:
    folder, truth = model
    config = SimPOConfig(beta=1.5, simpo_gamma=0.7, cpo_alpha=0.2, label_smoothing=0.1)
    job = preference_job(folder, tmp_path / "run", "simpo", simpo=config)
    got = records(train(job, "pp=1"))

    def loss(one: Replies) -> Tensor:
        chosen, rejected = (one.log_probs[name].mean() for name in ("chosen", "rejected"))
        p = torch.sigmoid(1.5 * (chosen - rejected) - 0.7)
        return -0.9 * p.log() - 0.1 * (1 - p).log() - 0.2 * chosen

    rows = pair_rows(tmp_path / "pairs.jsonl")
    want, policy = in_double(truth, job, rows, ("chosen", "rejected"), mean_over(loss))
    check(tmp_path / "run", got, want, policy)


def with_others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with the completion of the row before it."""
    return [{**row, "other": rows[i - 1]["completion"]} for i, row in enumerate(rows)]


def test_kto_is_the_plain_loop(model: Any, tmp_path: Path) -> None:
    folder, truth = model
    job = preference_job(folder, tmp_path / "run", "kto", **TABLES["kto"])
    got = records(train(job, "pp=1"))

    def loss(batch: list[Replies]) -> Tensor:
        kl = torch.stack([one.ratio("other") for one in batch]).mean().detach().clamp(min=0)
        losses = [
            1.3 * (1 - torch.sigmoid(0.3 * (one.ratio("completion") - kl)))
            if one.row["label"]
            else 0.7 * (1 - torch.sigmoid(0.3 * (kl - one.ratio("completion"))))
            for one in batch
        ]
        divergences.append(float(kl))
        return torch.stack(losses).mean()

    divergences: list[float] = []
    rows = with_others(unpaired_rows(tmp_path / "unpaired.jsonl"))
    want, policy = in_double(truth, job, rows, ("completion", "other"), loss)
    check(tmp_path / "run", got, want, policy)
    assert any(divergences), "a divergence of 0 in every step would show nothing"
    assert [(one.metrics or {})["kl"] for one in got] == pytest.approx(divergences, rel=1e-9, abs=1e-12)


def test_a_reward_model_is_the_plain_loop_and_opens_in_transformers(tmp_path: Path) -> None:
    small_model("llama", tmp_path / "causal", num_hidden_layers=2)
    scoring = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=1)
    scoring.config._attn_implementation = "eager"
    scoring.save_pretrained(tmp_path / "scoring")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "scoring" / name).write_text((tmp_path / "causal" / name).read_text())
    job = preference_job(tmp_path / "scoring", tmp_path / "run", "reward", **TABLES["reward"])
    got = records(train(job, "pp=1"))
    rows = pair_rows(tmp_path / "pairs.jsonl")
    policy = copy.deepcopy(scoring).eval()
    with in_float64(policy):
        optimizer = torch.optim.SGD(policy.parameters(), lr=job.learning_rate)
        for step, record in enumerate(got):
            losses = []
            for row in rows[8 * step : 8 * step + 8]:
                chosen, rejected = (
                    policy(torch.tensor([[*prompt, *reply]])).logits[0, 0]
                    for prompt, reply in (ids_of(row, row[name]) for name in ("chosen", "rejected"))
                )
                losses.append(-logsigmoid(chosen - rejected - row.get("margin", 0)) + 0.05 * (chosen + rejected) ** 2)
            loss = torch.stack(losses).mean()
            assert abs(record.loss - float(loss.detach())) < 1e-10
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    off, name = furthest(final(tmp_path / "run"), policy.state_dict())
    assert off < 1e-10, name
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final")
    assert again.config.num_labels == 1 and set(again.state_dict()) == set(final(tmp_path / "run"))


def test_a_reward_model_of_a_causal_model_keeps_its_layers_and_draws_a_head(model: Any, tmp_path: Path) -> None:
    folder, truth = model
    job = preference_job(folder, tmp_path / "run", "reward", learning_rate=0.0, max_steps=1, dtype="float32")
    train(job, "pp=2")
    made = final(tmp_path / "run")
    head = made.pop("score.weight")
    assert head.shape == (1, 48) and 0 < float(head.std()) < 0.1
    assert all(torch.equal(x, truth.state_dict()[name]) for name, x in made.items()) and "lm_head.weight" not in made
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]


@pytest.fixture(scope="module")
def alone(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[StepRecord], Path]]:
    """Each task's run on one process, with packed rows and an evaluation; made when it is first asked for."""
    made: dict[str, tuple[list[StepRecord], Path]] = {}

    def get(task: str) -> tuple[list[StepRecord], Path]:
        if task not in made:
            run = tmp_path_factory.mktemp(task) / "run"
            made[task] = (records(train(packed_job(model[0], run, task), "pp=1")), run)
        return made[task]

    return get


def packed_job(folder: Path, run: Path, task: str, **more: Any) -> Any:
    held_out = run.parent / "held_out.jsonl"
    (unpaired_rows if task == "kto" else pair_rows)(held_out, count=5, seed=9)
    fields = dict(
        packing=True, shuffle=True, seq_len=48, global_batch_size=4, eval_files=(str(held_out),), eval_steps=2
    )
    return preference_job(folder, run, task, **{**fields, **TABLES[task], **more})


def alike(got: list[StepRecord], want: list[StepRecord]) -> None:
    """But for the accuracy of DPO's first step, where both rewards are 0 to rounding."""
    for a, b in zip(got, want, strict=True):
        if a.step == 1 and a.metrics and b.metrics:
            a.metrics.pop("rewards/accuracies", None), b.metrics.pop("rewards/accuracies", None)
        assert a.loss == pytest.approx(b.loss, rel=1e-11)
        assert a.metrics == pytest.approx(b.metrics, rel=1e-9, abs=1e-12)
        assert (a.eval_loss is None) == (b.eval_loss is None)
        assert a.eval_loss is None or a.eval_loss == pytest.approx(b.eval_loss, rel=1e-11)
        assert (a.eval_metrics or {}) == pytest.approx(b.eval_metrics or {}, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "plan"), soak_but(MEET, itertools.product(TABLES, PLANS)))
def test_every_plan_is_one_process(task: str, plan: str, alone: Any, model: Any, tmp_path: Path) -> None:
    want, folder = alone(task)
    assert [record.eval_loss is not None for record in want] == [False, True, True]
    got = records(train(packed_job(model[0], tmp_path / "run", task), plan))
    alike(got, want)
    off, name = furthest(final(tmp_path / "run"), final(folder))
    assert off < 1e-10, name


@pytest.mark.slow
@pytest.mark.parametrize("task", soak_but(["kto", "reward"], TABLES))
def test_a_mixture_of_experts_spread_over_replicas_is_one_process(task: str, tmp_path: Path) -> None:
    small_model("qwen3_moe", tmp_path / "model", num_hidden_layers=2)
    want = records(train(packed_job(tmp_path / "model", tmp_path / "one", task), "pp=1"))
    got = records(train(packed_job(tmp_path / "model", tmp_path / "two", task), "dp=2,ep=2,zero=1"))
    alike(got, want)
    off, name = furthest(final(tmp_path / "two"), final(tmp_path / "one"))
    assert off < 1e-10, name


@pytest.mark.parametrize("task", ["dpo", "kto", "reward"])
def test_a_run_that_is_stopped_goes_on_with_the_references_it_has(
    task: str, alone: Any, model: Any, tmp_path: Path
) -> None:
    want, folder = alone(task)
    job = packed_job(model[0], tmp_path / "run", task)
    steps = itertools.count(1)
    first = records(train(job, "dp=2", lambda: next(steps) >= 2))
    assert len(first) == 2 or len(first) == 1
    reference = tmp_path / "run" / "reference.safetensors"
    before = (reference.read_bytes(), reference.stat().st_mtime_ns) if task != "reward" else None
    second = records(train(job, "pp=2"))
    alike([*first, *second], want)
    assert task == "reward" or (reference.read_bytes(), reference.stat().st_mtime_ns) == before
    off, name = furthest(final(tmp_path / "run"), final(folder))
    assert off < 1e-10, name


def test_a_longer_run_asks_the_initial_weights_again_and_not_the_trained_ones(
    alone: Any, model: Any, tmp_path: Path
) -> None:
    want, _ = alone("dpo")
    short = packed_job(model[0], tmp_path / "run", "dpo", max_steps=1)
    first = records(train(short, "pp=1"))
    second = records(train(replace(short, max_steps=3), "dp=2"))
    for a, b in zip([*first, *second], want, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-11)


@pytest.mark.parametrize("task", TABLES)
def test_packing_changes_nothing_that_a_reply_sees(task: str, model: Any, tmp_path: Path) -> None:
    """Rows of a step that are computed one by one or end to end: one mean, whatever stands beside a reply."""
    for size in (1, 3):
        job = preference_job(model[0], tmp_path / f"by {size}", task, microbatch_size=size, **TABLES[task])
        train(job, "pp=1")
    off, name = furthest(final(tmp_path / "by 1"), final(tmp_path / "by 3"))
    assert off < 1e-10, name


def test_float32_is_as_near_as_rounding_lets_it(model: Any, alone: Any, tmp_path: Path) -> None:
    want, _ = alone("dpo")
    got = records(train(packed_job(model[0], tmp_path / "run", "dpo", dtype="float32"), "pp=1"))
    assert [a.loss for a in got] == pytest.approx([b.loss for b in want], rel=1e-6)
