"""Whole runs of distillation: a plain loop over `transformers`, every plan, and teachers elsewhere that come and go."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.post_training.teachers import TeacherServer, address_of, serving
from tests.support.training.runs import final, records, short_job, train
from tests.support.training.training_step import furthest
from tests.unit.parallel.test_divergence import buckets, plain
from tllm.core.errors import ConfigError
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.questions import remote_answerer
from tllm.training.report.metrics import StepRecord
from tllm.training.trainer import RankTrainer

PLANS = (
    "dp=3:1",
    "pp=2,tp=2,sequence=true",
    "pp=2,chunks=2",
    "cp=2",
    "dp=2,zero=3",
    "dp=2,pp=2,tp=2,zero=2,schedule=zero_bubble",
    "dp=2,servers=1",
)
K = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and a teacher that is wider and deeper, of the same vocabulary."""
    made = tmp_path_factory.mktemp("models")
    save_model("llama", made / "student")
    save_model("llama", made / "teacher", seed=5, num_hidden_layers=6, intermediate_size=64)
    return made


def distilling(folder: Path, run: Path, **more: Any) -> Job:
    keys = {"teacher_model_name_or_path": str(folder / "teacher"), "teacher_dtype": "float64", "top_k": K}
    own = {**keys, **more.pop("distill", {})}
    run.parent.mkdir(exist_ok=True)
    return short_job(
        folder / "student", run, task="distill", distill=DistillationKeys(**own), **{"dtype": "float64", **more}
    )


@pytest.fixture(scope="module")
def golden(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[StepRecord], Path]:
    """Records and folder of the run on one rank, the teacher beside it."""
    run = tmp_path_factory.mktemp("golden") / "run"
    return records(train(distilling(folder, run), "pp=1")), run


def is_golden(run: Path, found: list[StepRecord], golden: tuple[list[StepRecord], Path], bits: bool = False) -> None:
    want, folder = golden
    assert len(found) == len(want)
    for got, one in zip(found, want, strict=True):
        assert got.loss == pytest.approx(one.loss, rel=1e-10)
        assert got.metrics is not None and one.metrics is not None
        for name in ("divergence", "cross_entropy", "rest_mass"):
            assert got.metrics[name] == pytest.approx(one.metrics[name], rel=1e-6), name
    weights, others = final(run), final(folder)
    if bits:
        assert all(torch.equal(weights[name], others[name]) for name in others)
    off, name = furthest(weights, others)
    assert off < 1e-10, name


def test_the_run_is_the_plain_loop(folder: Path, golden: tuple[list[StepRecord], Path]) -> None:
    found, run = golden
    job = distilling(folder, run)
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").double()
        for name in ("student", "teacher")
    )

    def learn(ids_T: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            log_p_TV = teacher(ids_T[None]).logits[0, :-1].log_softmax(-1)
        log_q_TV = student(ids_T[None]).logits[0, :-1].log_softmax(-1)
        ids_TK = log_p_TV.topk(K).indices
        return plain(buckets(log_p_TV, ids_TK), buckets(log_q_TV, ids_TK), 0.0).sum()

    losses = loop(job, student, learn)
    assert max(abs(got.loss - want) / want for got, want in zip(found, losses, strict=True)) < 1e-6


def loop(job: Job, model: transformers.PreTrainedModel, learn: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """The losses of a loop that anybody would write, over the same rows, as `runs.plain_loop`."""
    decays = [([p for p in model.parameters() if p.ndim > 1], job.weight_decay)]
    decays.append(([p for p in model.parameters() if p.ndim < 2], 0.0))
    groups = [dict(params=params, weight_decay=decay) for params, decay in decays]
    optimizer = torch.optim.AdamW(groups, lr=job.learning_rate)
    rates = transformers.get_scheduler(job.lr_scheduler_type, optimizer, job.warmup_steps, job.max_steps)
    rows = [torch.tensor(json.loads(line)["input_ids"]) for line in Path(job.train_files[0]).read_text().splitlines()]
    losses = []
    for step in range(job.max_steps):
        batch = rows[step * job.global_batch_size : (step + 1) * job.global_batch_size]
        tokens = sum(len(ids_T) - 1 for ids_T in batch)
        parts = [learn(ids_T) / tokens for ids_T in batch]
        torch.stack(parts).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(sum(part.item() for part in parts))
    return losses


@pytest.mark.parametrize("plan", soak_but([*PLANS[:3], *PLANS[4:5], *PLANS[6:]], PLANS))
def test_every_plan_is_the_run_on_one_rank(
    plan: str, folder: Path, golden: tuple[list[StepRecord], Path], tmp_path: Path
) -> None:
    found = records(train(distilling(folder, tmp_path / "run"), plan))
    if "servers" in plan:  # they tell what replica 0 sees
        off, name = furthest(final(tmp_path / "run"), final(golden[1]))
        assert off < 1e-10, name
        return
    is_golden(tmp_path / "run", found, golden)


def test_local_steps_do_not_depend_on_how_a_student_is_cut(folder: Path, tmp_path: Path) -> None:
    keys = {"local_steps": 2}
    whole = records(train(distilling(folder, tmp_path / "a" / "run", **keys), "dp=2"))
    cut = records(train(distilling(folder, tmp_path / "b" / "run", **keys), "dp=2,pp=2"))
    is_golden(tmp_path / "b" / "run", cut, (whole, tmp_path / "a" / "run"))


def test_all_tokens_under_a_cut_vocabulary(folder: Path, tmp_path: Path) -> None:
    keys = {"top_k": 0, "beta": 0.5, "alpha": 0.3, "temperature": 1.5}
    one = records(train(distilling(folder, tmp_path / "a" / "run", distill=keys), "pp=1"))
    cut = records(train(distilling(folder, tmp_path / "b" / "run", distill=keys), "tp=3,shares=1:2:1"))
    is_golden(tmp_path / "b" / "run", cut, (one, tmp_path / "a" / "run"))


@pytest.mark.parametrize("plan", soak_but(["tp=3,shares=1:2:1"], ["tp=3,shares=1:2:1", "dp=3:1", "cp=2"]))
def test_tokens_by_a_budget_under_every_cut(plan: str, folder: Path, tmp_path: Path) -> None:
    keys = {"top_k": 24, "kl_budget": 0.15, "beta": 0.5}
    one = records(train(distilling(folder, tmp_path / "a" / "run", distill=keys), "pp=1"))
    cut = records(train(distilling(folder, tmp_path / "b" / "run", distill=keys), plan))
    is_golden(tmp_path / "b" / "run", cut, (one, tmp_path / "a" / "run"))
    for got, want in zip(cut, one, strict=True):
        assert got.metrics is not None and want.metrics is not None
        assert 1 < want.metrics["teacher_top_k"] < 24 and 0 < want.metrics["teacher_kl"] <= 0.15
        for name in ("teacher_top_k", "teacher_kl"):
            assert got.metrics[name] == pytest.approx(want.metrics[name], rel=1e-12)


def test_a_budget_that_top_k_cannot_hold_is_told_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"top_k": 3, "kl_budget": 0.001}
    found = records(train(distilling(folder, tmp_path / "run", max_steps=2, distill=keys), "pp=1"))
    assert [(one.metrics or {})["teacher_top_k"] for one in found] == [3, 3]
    assert all((one.metrics or {})["teacher_kl"] > 0.001 for one in found)
    assert [one.message for one in caplog.records if "raise distill.top_k to hold it" in one.message] == [
        caplog.messages[0]
    ]


def elsewhere(folder: Path, run: Path, secret: Path, *servers: TeacherServer) -> Job:
    keys = {
        "teacher_model_name_or_path": None,
        "teachers": tuple(map(address_of, servers)),
        "teacher_secret": str(secret),
    }
    return distilling(folder, run, distill=keys)


def test_two_teachers_elsewhere_and_two_replicas(
    folder: Path, golden: tuple[list[StepRecord], Path], tmp_path: Path
) -> None:
    secret, teacher = tmp_path / "key", folder / "teacher"
    with serving(teacher, secret, "float64") as first, serving(teacher, secret, "float64") as second:
        found = records(train(elsewhere(folder, tmp_path / "run", secret, first, second), "dp=2"))
    is_golden(tmp_path / "run", found, golden)
    for record in found:
        assert record.metrics is not None
        # 8 ids of two bytes, 9 log-probabilities, the token and its place; headers and lengths of rows beside them
        assert 8 * 2 + 9 * 4 + 4 + 4 < record.metrics["teacher_bytes_per_token"] < 110


def test_log_probabilities_of_a_byte_from_elsewhere_are_those_of_a_teacher_beside_the_student(
    folder: Path, tmp_path: Path
) -> None:
    keys = {"top_k": 24, "kl_budget": 0.15, "log_prob_dtype": "uint8"}
    beside, secret = records(train(distilling(folder, tmp_path / "a" / "run", distill=keys), "pp=1")), tmp_path / "key"
    exact = records(
        train(distilling(folder, tmp_path / "b" / "run", distill={**keys, "log_prob_dtype": "float32"}), "pp=1")
    )
    with serving(folder / "teacher", secret, "float64") as server:
        job = elsewhere(folder, tmp_path / "c" / "run", secret, server)
        assert job.distill is not None
        job = replace(job, distill=replace(job.distill, **keys))
        found = records(train(job, "dp=2"))
    is_golden(tmp_path / "c" / "run", found, (beside, tmp_path / "a" / "run"))
    for got, want in zip(found, exact, strict=True):
        assert got.metrics is not None and want.metrics is not None
        assert got.metrics["teacher_kl"] <= 0.15
        assert got.metrics["teacher_top_k"] < want.metrics["teacher_top_k"] + 0.5, (
            "the bound of what codes lose is small"
        )
        assert 0 < abs(got.loss - want.loss) < 0.01 * want.loss


def test_a_teacher_that_is_lost_in_mid_run_changes_nothing(
    folder: Path, golden: tuple[list[StepRecord], Path], tmp_path: Path
) -> None:
    """One of two is lost after the second step, the other after the third, and comes back at its address."""
    secret, teacher, run = tmp_path / "key", folder / "teacher", tmp_path / "run"
    with serving(teacher, secret, "float64") as first, serving(teacher, secret, "float64") as second:
        port, back = second.address[1], threading.Event()

        def again() -> None:
            with serving(teacher, secret, "float64", port):
                back.wait(60)

        restarted = threading.Thread(target=again)

        def hurt(trainer: RankTrainer) -> None:
            following, steps = trainer._feed.next, iter(range(100))

            def next_batch(on_wait: Callable[[str], object]) -> Any:
                step = next(steps)
                if step == 2:
                    first.close()
                if step == 3:
                    second.close()
                    restarted.start()
                return following(on_wait)

            trainer._feed.next = next_batch  # type: ignore[method-assign]

        try:
            found = records(train(elsewhere(folder, run, secret, first, second), "pp=1", damage=hurt))
        finally:
            back.set()
            restarted.join(30)
    is_golden(run, found, golden, bits=True)


def test_teachers_that_are_lost_for_good_cost_no_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_answerer, "LOOK_SECONDS", 0.05)
    secret, run = tmp_path / "key", tmp_path / "run"
    with serving(folder / "teacher", secret, "float64") as one:

        def hurt(trainer: RankTrainer) -> None:
            following, steps = trainer._feed.next, iter(range(100))

            def next_batch(on_wait: Callable[[str], object]) -> Any:
                if next(steps) == 2 and trainer.config.rank == 0:
                    one.close()
                    monkeypatch.setattr(remote_answerer, "LOST_SECONDS", 0.5)
                return following(on_wait)

            trainer._feed.next = next_batch  # type: ignore[method-assign]

        job = replace(elsewhere(folder, run, secret, one), max_steps=8, save_steps=8)
        with pytest.raises(ConfigError, match=r"waits for .* of the teachers .*none could be reached"):
            train(job, "dp=2", damage=hurt)
    (save,) = run.glob("step-*")
    assert 2 <= int(save.name.removeprefix("step-")) < 8, "the steps before are saved"


def test_a_run_that_was_stopped_goes_on_with_the_same_rows(
    folder: Path, golden: tuple[list[StepRecord], Path], tmp_path: Path
) -> None:
    steps = iter([False, False, True])
    job = distilling(folder, tmp_path / "run")
    first = records(train(job, "pp=1", is_stopped=lambda: next(steps)))
    assert len(first) == 3
    rest = records(train(replace(job), "dp=2"))
    is_golden(tmp_path / "run", [*first, *rest], golden)
