"""NEFTune: the noise of a slow loop over plain numbers, alike under every plan, and none where nothing is learned."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.models.reference_gradients import in_float64
from tests.support.selection import soak_but
from tests.support.training.runs import final, job_for, plain_loop, records, rows_file, train
from tests.support.training.training_step import furthest
from tllm.training.data.seeds import draws_of, key_for
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.step.embedding_noise import uniform_noise

ALPHA = 12.0
PLANS = (
    "dp=2,pp=2,tp=2,zero=2,sequence=true,schedule=zero_bubble",
    "tp=3,shares=1:2:1",
    "dp=2,pp=2,cp=2,recompute=selective",
    "dp=3:1,zero=1,recompute=layer",
    "pp=2,chunks=2",
    "dp=2,zero=3",
    "tp=2,sequence=true,recompute=layer",
)
MASK = 2**64 - 1


def slow_noise(seed: int, step: int, row: int, tokens: int, columns: int, alpha: float) -> Tensor:
    """The noise of a document that fills its row, a number at a time, in Python's whole numbers."""

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    noise_TD = torch.zeros(tokens, columns, dtype=torch.float64)
    for token, draw in enumerate(draws_of(seed, step, row, tokens).tolist()):
        of_token = mixed((draw + key_for("neftune")) & MASK)
        for column in range(columns):
            number = mixed((of_token + column * 0x9E3779B97F4A7C15) & MASK) >> 11
            noise_TD[token, column] = (2 * number / 2**53 - 1) * alpha / (tokens * columns) ** 0.5
    return noise_TD


def noisy_job(model: Path, run: Path, **more: Any) -> Job:
    return job_for(model, run, **{"dtype": "float64", "neftune_noise_alpha": ALPHA, "max_grad_norm": 0.0, **more})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


def test_noise_is_uniform_and_of_the_size_that_its_document_gives() -> None:
    lengths_T = torch.tensor([300] * 300 + [75] * 75)
    draws_T = torch.from_numpy(draws_of(42, 3, 5, 375))
    noise_TD = uniform_noise(draws_T, lengths_T, 64, 5.0)
    for some, length in ((noise_TD[:300], 300), (noise_TD[300:], 75)):
        size = 5.0 / (length * 64) ** 0.5
        assert 0.999 * size < float(some.abs().max()) <= size
        assert abs(float(some.mean())) < 4 * size / (3 * some.numel()) ** 0.5
        assert abs(float(some.var()) / (size**2 / 3) - 1) < 0.05
    for pair in ((noise_TD[1:300], noise_TD[:299]), (noise_TD[:300, 1:], noise_TD[:300, :-1])):
        assert abs(float((pair[0] * pair[1]).mean() / noise_TD[:300].var())) < 0.03
    assert torch.equal(uniform_noise(draws_T[100:130], lengths_T[100:130], 64, 5.0), noise_TD[100:130])


@pytest.mark.parametrize("case", ["llama", "granite"])
def test_a_run_is_that_of_a_slow_loop_with_noise_after_the_embedding(case: str, tmp_path: Path) -> None:
    """Granite's hidden states are scaled behind the embedding, and the noise with them."""
    model = tmp_path / "model"
    save_model(case, model)
    job = noisy_job(model, tmp_path / "run", max_steps=3, max_grad_norm=1.0)
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    documents = itertools.count()

    def hook(module: Any, given: Any, x_1TD: Tensor) -> Tensor:
        step, row = divmod(next(documents), job.global_batch_size)
        return x_1TD + slow_noise(job.seed, step, row, x_1TD.shape[1], x_1TD.shape[2], ALPHA)

    truth.get_input_embeddings().register_forward_hook(hook)
    with in_float64(truth):
        want = plain_loop(job, truth)
    got = [record.loss for record in records(train(job, "pp=1"))]
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-10
    plain = records(train(noisy_job(model, tmp_path / "plain", neftune_noise_alpha=0.0, max_steps=1), "pp=1"))
    assert abs(plain[0].loss - got[0]) > 1e-4, "noise is seen"


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and folder of the run on one rank, of packed rows."""
    run = tmp_path_factory.mktemp("golden") / "run"
    job = noisy_job(model, run, packing=True, seq_len=48)
    return [record.loss for record in records(train(job, "pp=1"))], run


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(PLANS[2:3], PLANS))
def test_every_plan_draws_the_same_noise(
    plan: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    want, folder = golden
    job = noisy_job(model, tmp_path / "run", packing=True, seq_len=48, microbatch_size=2)
    got = [record.loss for record in records(train(job, plan))]
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-11
    off, name = furthest(final(tmp_path / "run"), final(folder))
    assert off < 1e-10, name


def test_a_run_that_is_stopped_goes_on_with_the_same_bits(
    model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    job, steps = noisy_job(model, tmp_path / "run", packing=True, seq_len=48), itertools.count(1)
    train(job, "pp=1", lambda: next(steps) >= 3)
    train(job, "pp=1")
    assert all(torch.equal(x, final(golden[1])[name]) for name, x in final(tmp_path / "run").items())


def test_an_evaluation_has_no_noise(model: Path, tmp_path: Path) -> None:
    """At a learning rate of 0 the model stays as it is, so that evaluations of both runs are of one model."""
    held_out = rows_file(tmp_path / "held.jsonl", count=5, seed=2)
    told = []
    for alpha in (0.0, ALPHA):
        run = tmp_path / f"run{alpha:g}"
        more = dict(eval_files=(str(held_out),), eval_steps=1, learning_rate=0.0, max_steps=2)
        train(noisy_job(model, run, neftune_noise_alpha=alpha, **more), "pp=1")
        told.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    for plain, noisy in zip(*told, strict=True):
        assert plain["eval_loss"] == noisy["eval_loss"] and plain["loss"] != noisy["loss"]


@pytest.mark.slow
def test_noise_goes_with_an_adapter_and_its_dropout(model: Path, tmp_path: Path) -> None:
    lora = LoraJob(r=4, lora_dropout=0.2)
    want = records(train(noisy_job(model, tmp_path / "one", lora=lora, max_steps=3), "pp=1"))
    got = records(train(noisy_job(model, tmp_path / "run", lora=lora, max_steps=3), "pp=2,tp=2,sequence=true"))
    plain = records(train(job_for(model, tmp_path / "plain", lora=lora, max_steps=3, dtype="float64"), "pp=1"))
    assert all(abs(a.loss - b.loss) < 1e-12 * b.loss for a, b in zip(got, want, strict=True))
    assert abs(plain[0].loss - want[0].loss) > 1e-4
