"""Distillation of hidden states: a plain loop over `transformers`, every plan, and teachers elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.parity.training.distillation.test_distillation_runs import K, distilling
from tests.support.models.families import save_model
from tests.support.models.reference_gradients import in_float64
from tests.support.selection import soak_but
from tests.support.training.post_training.distilled_task import on_policy_job, write_models
from tests.support.training.post_training.teachers import address_of, serving
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tests.unit.parallel.test_divergence import buckets, plain
from tllm.core.errors import ConfigError
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.data.seeds import key_for
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.report.metrics import StepRecord
from tllm.training.state.tensor_blocks import PROJECTION
from tllm.training.trainer import RankTrainer

WIDTH, TEACHER_WIDTH, LAYERS = 48, 64, 4
PAIRS = ((0, 0), (2, -3), (-1, -1))
"""The student has 4 layers and the teacher 6: the embeddings, what layers 2 and 4 give, and both final norms."""
NAMES = [f"{PROJECTION}{student}.{teacher}.weight" for student, teacher in ((0, 0), (2, -3), (4, -1))]

PLANS = (
    "dp=3:1",
    "pp=2,tp=2,sequence=true",
    "pp=2,chunks=2",
    "pp=4,recompute=layer",
    "tp=2",
    "cp=2",
    "dp=2,zero=3",
    "dp=2,pp=2,tp=2,zero=2,schedule=zero_bubble",
)
Told = tuple[list[StepRecord], dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, and a teacher that is wider and deeper."""
    made = tmp_path_factory.mktemp("models")
    save_model("llama", made / "student")
    save_model("llama", made / "teacher", seed=5, num_hidden_layers=6, hidden_size=TEACHER_WIDTH, intermediate_size=64)
    return made


def job_of(folder: Path, run: Path, distill: dict[str, Any] | None = None, **more: Any) -> Job:
    keys = {
        "hidden_state_layers": PAIRS,
        "teacher_hidden_size": TEACHER_WIDTH,
        "hidden_state_loss_weight": 0.5,
        "hidden_state_dtype": "float64",
        **(distill or {}),
    }
    return distilling(folder, run, distill=keys, **{"max_grad_norm": 0, **more})


def told(job: Job, plan: str) -> Told:
    """What each step told, and the finished model with the projections of the last save."""
    found = records(train(job, plan))
    run = Path(job.output_dir)
    return found, learned(run, job.max_steps)


def learned(run: Path, step: int) -> dict[str, Tensor]:
    save, model = open_folder(run / f"step-{step}"), final(run)
    projections = [name for name in save.shapes if name.startswith(PROJECTION)]
    assert projections and not any(name.startswith(PROJECTION) for name in model), "they are no part of the model"
    return {**model, **{name: save.whole(name) for name in projections}}


def is_alike(got: Told, want: Told, off: float = 1e-10) -> None:
    assert len(got[0]) == len(want[0])
    for one, other in zip(got[0], want[0], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=off) and one.grad_norm == pytest.approx(
            other.grad_norm, rel=off
        )
        assert one.metrics is not None and other.metrics is not None
        assert one.metrics["hidden_state_loss"] == pytest.approx(other.metrics["hidden_state_loss"], rel=off)
    far, name = furthest(got[1], want[1])
    assert far < off, name


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The run on one rank, the teacher beside it."""
    return told(job_of(folder, tmp_path_factory.mktemp("alone") / "run"), "pp=1")


@pytest.mark.parametrize("loss", soak_but(["mse"], ["mse", "cosine"]))
def test_the_run_is_the_plain_loop(loss: str, folder: Path, alone: Told, tmp_path: Path) -> None:
    """Losses, and every weight of the student and of the projections after four steps of AdamW."""
    job = job_of(folder, tmp_path / "run", {"hidden_state_loss": loss})
    found, weights = alone if loss == "mse" else told(job, "pp=1")
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").double()
        for name in ("student", "teacher")
    )
    projections = [first_projection(job.seed, name) for name in NAMES]
    parts: dict[str, list[Tensor]] = {"loss": [], "states": []}

    def learn(ids_T: Tensor) -> Tensor:
        with torch.no_grad(), in_float64(teacher):
            told = teacher(ids_T[None], output_hidden_states=True)
        with in_float64(student):
            mine = student(ids_T[None], output_hidden_states=True)
        log_p_TV = told.logits[0, :-1].log_softmax(-1)
        log_q_TV = mine.logits[0, :-1].log_softmax(-1)
        ids_TK = log_p_TV.topk(K).indices
        of_logits = plain(buckets(log_p_TV, ids_TK).float().double(), buckets(log_q_TV, ids_TK), 0.0).sum()
        of_states = []
        for (ours, theirs), linear in zip(PAIRS, projections, strict=True):
            x_TD, y_TD = linear(mine.hidden_states[ours][0, :-1]), told.hidden_states[theirs][0, :-1]
            of_states.append(
                F.mse_loss(x_TD, y_TD, reduction="none").mean(-1).sum()
                if loss == "mse"
                else (1 - F.cosine_similarity(x_TD, y_TD, dim=-1)).sum()
            )
        parts["states"].append(torch.stack(of_states).mean().detach())
        return of_logits + 0.5 * torch.stack(of_states).mean()

    losses, of_states = plain_steps(job, student, projections, learn, parts["states"])
    for got, want, states in zip(found, losses, of_states, strict=True):
        assert got.loss == pytest.approx(want, rel=1e-10)
        assert got.metrics is not None and got.metrics["hidden_state_loss"] == pytest.approx(states, rel=1e-10)
    wanted = {name: x.detach() for name, x in student.named_parameters()}
    wanted |= {name: linear.weight.detach() for name, linear in zip(NAMES, projections, strict=True)}
    assert wanted.keys() == weights.keys()
    far, name = furthest(weights, wanted)
    assert far < 1e-10, name


def first_projection(seed: int, name: str) -> torch.nn.Linear:
    linear = torch.nn.Linear(WIDTH, TEACHER_WIDTH, bias=False, dtype=torch.float64)
    dice = torch.Generator().manual_seed(key_for("projection", seed, name) >> 1)
    with torch.no_grad():
        linear.weight.copy_(torch.empty(TEACHER_WIDTH, WIDTH).uniform_(-(WIDTH**-0.5), WIDTH**-0.5, generator=dice))
    return linear


def plain_steps(
    job: Job,
    model: transformers.PreTrainedModel,
    projections: list[torch.nn.Linear],
    learn: Callable[[Tensor], Tensor],
    told: list[Tensor],
) -> tuple[list[float], list[float]]:
    """The losses of a loop that anybody would write, and the means of what `learn` told of each row."""
    every = [*model.parameters(), *(linear.weight for linear in projections)]
    groups = [dict(params=[p for p in every if p.ndim > 1], weight_decay=job.weight_decay)]
    groups.append(dict(params=[p for p in every if p.ndim < 2], weight_decay=0.0))
    optimizer = torch.optim.AdamW(groups, lr=job.learning_rate)
    rates = transformers.get_scheduler(job.lr_scheduler_type, optimizer, job.warmup_steps, job.max_steps)
    rows = [torch.tensor(json.loads(line)["input_ids"]) for line in Path(job.train_files[0]).read_text().splitlines()]
    losses, means = [], []
    for step in range(job.max_steps):
        batch = rows[step * job.global_batch_size : (step + 1) * job.global_batch_size]
        tokens = sum(len(ids_T) - 1 for ids_T in batch)
        told.clear()
        loss = torch.stack([learn(ids_T) for ids_T in batch]).sum() / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(loss.item())
        means.append(float(torch.stack(told).sum()) / tokens)
    return losses, means


@pytest.mark.parametrize("plan", soak_but([PLANS[1], PLANS[6]], PLANS))
def test_every_plan_is_the_run_on_one_rank(plan: str, folder: Path, alone: Told, tmp_path: Path) -> None:
    is_alike(told(job_of(folder, tmp_path / "run"), plan), alone)


@pytest.mark.soak
def test_a_run_goes_on_under_another_plan_with_its_projections(folder: Path, alone: Told, tmp_path: Path) -> None:
    steps = iter([False, False, True])
    job = job_of(folder, tmp_path / "run")
    first = records(train(job, "pp=1", is_stopped=lambda: next(steps)))
    rest, weights = told(job, "dp=2,pp=2")
    is_alike(([*first, *rest], weights), alone)


@pytest.mark.soak
@pytest.mark.parametrize("keys", [{"lora": LoraJob(r=4, lora_alpha=8.0)}, {"local_steps": 2}], ids=["lora", "local"])
def test_adapters_and_local_steps_do_not_depend_on_how_a_student_is_cut(
    keys: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    one, other = (
        told(job_of(folder, tmp_path / plan / "run", **keys), plan) for plan in ("dp=2", "dp=2,pp=2,tp=2,sequence=true")
    )
    is_alike(other, one)


@pytest.mark.soak
def test_what_the_student_writes_is_judged_by_hidden_states_too(tmp_path: Path) -> None:
    write_models(tmp_path)
    keys = {"hidden_state_layers": ((1, 2), (-1, -1)), "teacher_hidden_size": WIDTH, "hidden_state_dtype": "float64"}
    one, other = (
        told(on_policy_job(tmp_path, tmp_path / plan / "run", distill=keys), plan) for plan in ("pp=1", "dp=2,pp=2")
    )
    assert {(record.metrics or {})["on_policy"] for record in one[0]} == {0, 1}
    is_alike(other, one, 1e-9)


def test_a_teacher_elsewhere_whose_successor_has_another_width(folder: Path, tmp_path: Path) -> None:
    """The bytes are counted; the run ends where another model answers at the address of the one that was lost."""
    secret, port, back = tmp_path / "key", 0, threading.Event()
    keys = {"teacher_model_name_or_path": None, "teacher_secret": str(secret), "hidden_state_dtype": "bfloat16"}
    run, told_bytes = tmp_path / "run", list[float]()

    def another() -> None:
        with serving(folder / "student", secret, port=port):
            back.wait(60)

    successor = threading.Thread(target=another)
    with serving(folder / "teacher", secret) as server:
        port = server.address[1]

        def hurt(trainer: RankTrainer) -> None:
            following, steps, took = trainer._feed.next, iter(range(100)), trainer._record

            def next_batch(on_wait: Callable[[str], object]) -> Any:
                if next(steps) == 2:
                    server.close()
                    successor.start()
                return following(on_wait)

            def record(*counters: Any) -> Any:
                made = took(*counters)
                told_bytes.append((made[0].metrics or {})["teacher_bytes_per_token"])
                return made

            trainer._feed.next = next_batch  # type: ignore[method-assign]
            trainer._record = record  # type: ignore[method-assign]

        job = job_of(folder, run, {**keys, "teachers": (address_of(server),)}, max_steps=12)
        try:
            with pytest.raises(ConfigError, match=f"its hidden_size is {WIDTH} and .* is {TEACHER_WIDTH}"):
                train(job, "pp=1", damage=hurt)
        finally:
            back.set()
            successor.join(30)
    states = len(PAIRS) * TEACHER_WIDTH * 2
    assert told_bytes and all(states < taken < states + 110 for taken in told_bytes)
