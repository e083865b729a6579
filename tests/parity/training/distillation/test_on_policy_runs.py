"""On-policy distillation: a loop over `transformers`, every plan, runs that go on, and teachers elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.parity.training.policy.test_remote_rollouts import HangsUp
from tests.support.models.reference_gradients import in_float64
from tests.support.selection import soak_but
from tests.support.training.post_training.distilled_task import K, on_policy_job, write_models
from tests.support.training.post_training.rollout_servers import sampling
from tests.support.training.post_training.teachers import address_of, serving
from tests.support.training.post_training.told_runs import check_same_steps
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tests.unit.parallel.test_divergence import buckets, plain
from tllm.core.errors import ConfigError
from tllm.node.roles.rollout_model import RolloutModel
from tllm.training.job.job import Job
from tllm.training.policy.on_policy_rows import OnPolicyRows, is_on_policy
from tllm.training.policy.rollouts import Completion
from tllm.training.report.events import RunEnded
from tllm.training.report.metrics import StepRecord, read_records

PLANS = (
    "dp=2",
    "dp=3:1",
    "dp=9",
    "pp=2",
    "tp=2",
    "dp=2,zero=2,recompute=layer",
    "pp=2,tp=1+2",
    "dp=2,pp=2,tp=2,zero=1,schedule=zero_bubble",
)
KEYS = {"beta": 0.5, "mask_truncated_completions": True, "temperature": 1.5}
Told = tuple[list[StepRecord], dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_models(made)
    return made


def told(job: Job, plan: str) -> Told:
    return records(train(job, plan)), final(Path(job.output_dir))


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The run in one process."""
    return told(on_policy_job(folder, tmp_path_factory.mktemp("alone") / "run", distill=KEYS), "pp=1")


def is_alone(got: Sequence[StepRecord], weights: dict[str, Tensor], alone: Told) -> None:
    want, tensors = alone
    assert [record.step for record in got] == [record.step for record in want]
    check_same_steps(got, want, but=["teacher_bytes_per_token"])
    off, where = furthest(weights, tensors)
    assert off < 1e-11, where


@pytest.mark.parametrize("ahead", soak_but([1], [0, 1]))
def test_the_run_is_the_plain_loop(ahead: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes the completions that were sampled. That its own weights would have given them the very
    log-probabilities that the engine told shows that they are the student's of that step, or of the one before where
    another machine writes a step ahead."""
    sampled: dict[int, Sequence[Completion]] = {}
    learned = OnPolicyRows.learned

    def kept(rows: OnPolicyRows, step: int, completions: Sequence[Completion]) -> Any:
        sampled[step] = completions
        return learned(rows, step, completions)

    monkeypatch.setattr(OnPolicyRows, "learned", kept)
    with sampling(folder / "student", tmp_path / "key") if ahead else nullcontext() as one:
        keys = {} if one is None else written_ahead(tmp_path / "key", address_of(one))
        job = on_policy_job(folder, tmp_path / "run", max_grad_norm=0, distill=keys)  # torch's clipping adds 1e-6
        found = records(train(job, "pp=1"))
    assert job.distill is not None
    own = [is_on_policy(job.distill, job.seed, step) for step in range(job.max_steps)]
    assert {bool(sampled[step]) for step in range(job.max_steps)} == {True, False}
    assert [bool(sampled[step]) for step in range(job.max_steps)] == own
    assert [(record.metrics or {})["on_policy"] for record in found] == own
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").double().eval()
        for name in ("student", "teacher")
    )
    groups = [([p for p in student.parameters() if p.ndim > 1], job.weight_decay)]
    groups.append(([p for p in student.parameters() if p.ndim < 2], 0.0))
    optimizer = torch.optim.AdamW(
        [dict(params=parameters, weight_decay=decay) for parameters, decay in groups], lr=job.learning_rate
    )
    rates = transformers.get_scheduler(job.lr_scheduler_type, optimizer, job.warmup_steps, job.max_steps)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    ids_of = json.loads((folder / "student" / "tokenizer.json").read_text())["model"]["vocab"]
    writers = [deepcopy(student)]
    for step, record in enumerate(found):
        parts, tokens = [], 0
        writer = writers[max(0, step - ahead)]
        for place in range(job.global_batch_size):
            row = rows[(step * job.global_batch_size + place) % len(rows)]
            prompt = [ids_of[letter] for letter in row["prompt"]]
            reply = list(sampled[step][place].ids) if own[step] else [ids_of[one] for one in row["completion"]] + [0]
            ids_T = torch.tensor(prompt + reply)
            asked = slice(len(prompt) - 1, len(ids_T) - 1)
            with torch.no_grad():
                log_p_TV = logits(teacher, ids_T)[asked].log_softmax(-1)
            log_q_TV = logits(student, ids_T)[asked].log_softmax(-1)
            if own[step]:
                told_T = torch.tensor(sampled[step][place].log_probs, dtype=torch.float64)
                with torch.no_grad():
                    log_w_TV = logits(writer, ids_T)[asked].log_softmax(-1)
                assert (log_w_TV.gather(-1, ids_T[len(prompt) :, None])[:, 0] - told_T).abs().max() < 1e-9
            ids_TK = log_p_TV.topk(K).indices
            log_p_TB = buckets(log_p_TV, ids_TK).float().double()  # as it travels
            parts.append(plain(log_p_TB, buckets(log_q_TV, ids_TK), 0.0).sum())
            tokens += len(reply)
        loss = torch.stack(parts).sum() / tokens
        assert abs(record.loss - loss.item()) < 1e-10
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        writers.append(deepcopy(student))


def written_ahead(secret: Path, *servers: str) -> dict[str, Any]:
    """The keys of a student that other machines write for, a step ahead."""
    return {"rollout_servers": servers, "rollout_secret": str(secret), "max_staleness": 1}


@pytest.mark.soak
def test_a_student_written_for_ahead_has_the_same_bits_whoever_writes_and_wherever_it_stops(
    folder: Path, tmp_path: Path
) -> None:
    secret, dying = tmp_path / "key", HangsUp(RolloutModel.open(str(folder / "student")))
    more = dict[str, Any](dtype="float32", deterministic=True)
    with sampling(folder / "student", secret) as one, sampling(folder / "student", secret, dying) as two:
        dying.servers.append(two)
        keys = {**KEYS, "lmbda": 0.8}
        calm = {**keys, **written_ahead(secret, address_of(one))}
        _, want = told(on_policy_job(folder, tmp_path / "calm", distill=calm, **more), "pp=1")
        both = {**keys, **written_ahead(secret, address_of(one), address_of(two))}
        job = on_policy_job(folder, tmp_path / "run", distill=both, **more)
        for plan in ("pp=1", "dp=2", "pp=1"):
            train(job, plan, lambda: True)
        _, got = told(job, "dp=2,zero=1")
    assert len(dying.asked) >= 2 and all(torch.equal(got[name], want[name]) for name in want)


def logits(model: transformers.PreTrainedModel, ids_T: Tensor) -> Tensor:
    """Of `transformers`, in float64 throughout."""
    with in_float64(model):
        found: Tensor = model(ids_T[None]).logits[0]
    return found


@pytest.mark.parametrize("plan", soak_but(("dp=3:1", "dp=2,pp=2,tp=2,zero=1,schedule=zero_bubble"), PLANS))
def test_every_plan_is_one_process(plan: str, folder: Path, alone: Told, tmp_path: Path) -> None:
    is_alone(*told(on_policy_job(folder, tmp_path / "run", distill=KEYS), plan), alone)


def test_a_completion_that_was_cut_off_is_learned_unless_the_job_masks_it(
    folder: Path, alone: Told, tmp_path: Path
) -> None:
    clipped = [(record.metrics or {}).get("completions/clipped_ratio", 0) for record in alone[0]]
    first = next(step for step, ratio in enumerate(clipped) if ratio)
    keys = {**KEYS, "mask_truncated_completions": False}
    unmasked, _ = told(on_policy_job(folder, tmp_path / "run", distill=keys), "pp=1")
    assert [one.loss for one in unmasked[:first]] == [one.loss for one in alone[0][:first]]
    assert unmasked[first].loss != alone[0][first].loss and unmasked[first].tokens == alone[0][first].tokens


def test_a_run_that_goes_on_is_one_that_never_stopped(folder: Path, alone: Told, tmp_path: Path) -> None:
    """It goes on under another plan, at a step whose completions are the student's after one of the data's."""
    job = on_policy_job(folder, tmp_path / "run", distill=KEYS)
    assert job.distill is not None
    own = [is_on_policy(job.distill, job.seed, step) for step in range(job.max_steps)]
    stop = next(step for step in range(1, job.max_steps) if own[step] and not own[step - 1])
    steps = iter([step == stop for step in range(1, job.max_steps + 1)])
    done = [one.step for one in train(job, "pp=1", lambda: next(steps)) if isinstance(one, RunEnded)]
    assert done == [stop]
    records(train(job, "dp=2"))
    is_alone(read_records(tmp_path / "run" / "metrics.jsonl"), final(tmp_path / "run"), alone)


def test_a_deterministic_run_is_one_process_to_the_bit(folder: Path, tmp_path: Path) -> None:
    found = []
    for plan in ("pp=1", "dp=2,zero=1"):
        job = on_policy_job(folder, tmp_path / plan, deterministic=True, dtype="float32", max_steps=3)
        found.append(told(job, plan))
    (one, tensors), (other, others) = found
    assert [record.loss for record in one] == [record.loss for record in other]
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_teachers_elsewhere_of_whom_one_is_lost(folder: Path, alone: Told, tmp_path: Path) -> None:
    secret, teacher = tmp_path / "key", folder / "teacher"
    with serving(teacher, secret, "float64") as first, serving(teacher, secret, "float64") as second:
        keys = {"teachers": (address_of(first), address_of(second)), "teacher_secret": str(secret)}
        job = on_policy_job(folder, tmp_path / "run", distill={**KEYS, "teacher_model_name_or_path": None, **keys})
        calls = count()  # of both ranks

        def lose() -> bool:
            if next(calls) == 2:
                first.close()
            return False

        found = records(train(job, "dp=2", lose))
    is_alone(found, final(tmp_path / "run"), alone)
    own = [record.metrics or {} for record in found]
    assert all(25 < metrics["teacher_bytes_per_token"] < 400 for metrics in own if metrics["divergence"])


def test_a_row_that_cannot_be_read_costs_no_step(folder: Path, tmp_path: Path) -> None:
    """The rows of the data lie ahead: a completion is missing in the first step of data after one step is done."""
    job = on_policy_job(folder, tmp_path / "run")
    assert job.distill is not None
    own = [is_on_policy(job.distill, job.seed, step) for step in range(job.max_steps)]
    step = next(step for step in range(1, job.max_steps) if not own[step])
    lines = (folder / "rows.jsonl").read_text().splitlines()
    number = step * job.global_batch_size % len(lines)
    lines[number] = json.dumps({"prompt": "1="})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines))
    job = on_policy_job(folder, tmp_path / "run", train_files=(str(rows),))
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line {number + 1}: .* has no reply"):
        train(job, "dp=2")
    assert (tmp_path / "run" / f"step-{step}").is_dir()
