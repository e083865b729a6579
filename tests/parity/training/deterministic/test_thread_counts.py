"""With `deterministic = true` a run ends with the same bits whatever threads its ranks have, as many or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.post_training.teachers import address_of, serving
from tests.support.training.runs import final, job_for, records, rows_file, train
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.rollout_keys import RejectionConfig
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.reward_models.model_rewards import ScorerHere
from tllm.training.reward_models.reward_messages import ScoringRun, TextToScore
from tllm.training.reward_models.reward_model import RewardModel
from tllm.training.trainer import RankTrainer

FAMILIES = ("qwen3_moe", "gemma2", "gpt_oss_moe", "glm4_moe_lite", "qwen3_next_moe")
"""Experts; attention that no kernel of training makes: capped scores, sinks, latents; states of delta nets."""

SHAPE = dict(
    hidden_size=112, intermediate_size=330, head_dim=16, vocab_size=211, num_attention_heads=7, num_key_value_heads=1
)
"""Not what threads divide evenly."""

Found = tuple[list[tuple[float, float | None]], dict[str, Tensor], str]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(job: Job, plan: str, threads: Sequence[int]) -> Found:
    """Losses and norms of the steps, the finished weights and the completions of a run, whose ranks have so many."""
    turns = itertools.cycle(threads)
    torch.set_num_threads(threads[0])

    def divide(trainer: RankTrainer) -> None:
        torch.set_num_threads(next(turns))

    steps = [(one.loss, one.grad_norm) for one in records(train(job, plan, damage=divide))]
    told = Path(job.output_dir) / COMPLETIONS
    return steps, final(Path(job.output_dir)), told.read_text() if told.is_file() else ""


def differs(one: Found, other: Found) -> list[str]:
    """What of two runs is not the same to the bit."""
    weights = [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]
    return weights + [name for name, at in (("steps", 0), ("completions", 2)) if one[at] != other[at]]


def sft(folder: Path, number: int, family: str = "llama", **more: Any) -> Job:
    """Three steps over documents of up to 280 tokens, so that torch gives every thread a part."""
    model = folder / "model"
    if not model.is_dir():
        save_model(family, model, **(SHAPE if family == "llama" else {}))
        rows_file(folder / "long.jsonl", 12, 280, 101)
    keys: dict[str, Any] = dict(seq_len=288, global_batch_size=4, microbatch_size=2, max_steps=3, save_steps=3)
    keys |= dict(train_files=(str(folder / "long.jsonl"),), deterministic=True)
    return job_for(model, folder / f"run-{number}", **(keys | more))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fine_tuning_does_not_know_how_many_threads_there_are(dtype: str, tmp_path: Path) -> None:
    runs = [("pp=1", (1,)), ("pp=1", (2,)), ("pp=1", (3,)), ("pp=1", (4,)), ("dp=2,zero=1", (3, 1)), ("dp=2", (2, 4))]
    one, *others = (run(sft(tmp_path, at, dtype=dtype), *each) for at, each in enumerate(runs))
    for each, other in zip(runs[1:], others, strict=True):
        assert not differs(one, other), each


def test_stages_with_unlike_threads_are_one_process(tmp_path: Path) -> None:
    one = run(sft(tmp_path, 0), "pp=1", (2,))
    assert not differs(one, run(sft(tmp_path, 1), "pp=2,schedule=zero_bubble", (1, 4)))


def test_a_run_that_is_not_deterministic_knows(tmp_path: Path) -> None:
    """Else this file proves nothing."""
    one, other = (run(sft(tmp_path, at, deterministic=False), "pp=1", (at,)) for at in (1, 3))
    assert differs(one, other)


@pytest.mark.parametrize("family", soak_but(FAMILIES[:3], FAMILIES))
def test_every_kind_of_layer_is_computed_so(family: str, tmp_path: Path) -> None:
    one, other = (run(sft(tmp_path, at, family), "pp=1", (at,)) for at in (1, 3))
    assert not differs(one, other)


def test_adapters_are_learned_so(tmp_path: Path) -> None:
    """Whose matrices have eight rows or columns."""
    lora = LoraJob(r=8, target_modules=("all-linear",))
    one, other = (run(sft(tmp_path, at, lora=lora), "pp=1", (at,)) for at in (1, 4))
    assert not differs(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("teacher", ["beside", "elsewhere"])
def test_what_a_teacher_says_does_not_know_either(teacher: str, dtype: str, tmp_path: Path) -> None:
    """Nor do those who learn from it, of the same process or another, while it computes for the next step."""
    shape = {**SHAPE, "head_dim": 24}  # attention that is torch's
    save_model("llama", tmp_path / "teacher", seed=5, num_hidden_layers=3, **shape)
    runs = [("pp=1", (1,)), ("pp=1", (2,)), ("pp=1", (3,)), ("pp=1", (4,)), ("dp=2,zero=1", (3, 1))]
    found = []
    with ExitStack() as stack:
        keys: dict[str, Any] = dict(teacher_model_name_or_path=str(tmp_path / "teacher"), teacher_dtype=dtype)
        for number, (plan, threads) in enumerate(runs):
            torch.set_num_threads(threads[0])
            if teacher == "elsewhere":
                secret = tmp_path / "key"
                server = stack.enter_context(serving(tmp_path / "teacher", secret, dtype))
                keys = dict(teachers=(address_of(server),), teacher_secret=str(secret))
            table = DistillationKeys(**keys, top_k=8, alpha=0.2)
            job = sft(tmp_path, number, dtype=dtype, task="distill", distill=table)
            found.append(run(job, plan, threads))
    for each, other in zip(runs[1:], found[1:], strict=True):
        assert not differs(found[0], other), each


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_reward_model_says_does_not_know_either(dtype: str, tmp_path: Path) -> None:
    """Beside the trainer, and on a node, in the session of its run."""
    torch.manual_seed(7)
    kinds: Any = transformers
    shape = {**SHAPE, "head_dim": 24}  # attention that is torch's
    config = kinds.LlamaConfig(**shape, num_hidden_layers=3, num_labels=1, pad_token_id=0, initializer_range=0.3)
    kinds.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    model = RewardModel.open("r", AnsweringModel.find_scoring(str(tmp_path)), dtype)
    ids = np.random.default_rng(3).integers(0, config.vocab_size, (4, 280)).astype("<i4")
    texts = [TextToScore(number, text.tobytes()) for number, text in enumerate(ids)]
    session = model.open_session(ScoringRun(config.vocab_size, deterministic=True))
    found = list[list[float]]()
    for threads in (1, 3, 4):
        torch.set_num_threads(threads)
        found += [ScorerHere(model, True).scores(texts), [session.answer(text).score for text in texts]]
    assert all(scores == found[0] for scores in found)
    if dtype == "float32":  # in 16 bits what threads change is rounded away more often than not
        assert ScorerHere(model, False).scores(texts) != found[0], "else this proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "rejection"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_sampled_and_learned_from_it_does_not_know_either(dtype: str, name: str, tmp_path: Path) -> None:
    """Of GRPO, with a reference and two steps on the same completions; and of the best of four completions."""
    task = tmp_path / "task"
    write_task(task)
    config = json.loads((task / "config.json").read_text())
    more = dict(head_dim=16, hidden_size=112, intermediate_size=330, num_attention_heads=7, num_key_value_heads=1)
    (task / "config.json").write_text(json.dumps({**config, **more}))
    runs = [("pp=1", (1,)), ("pp=1", (2,)), ("pp=1", (3,)), ("pp=1", (4,)), ("dp=2", (1, 3)), ("dp=4,zero=1", (2, 1))]
    found, keys = [], dict(reward_funcs=(f"{task / 'rewards.py'}:closeness",), num_generations=4)
    tables = {
        "grpo": grpo(task, beta=0.1, num_iterations=2),
        "rejection": RejectionConfig(**keys, max_completion_length=8, keep=2),  # type: ignore[arg-type]
    }
    for number, (plan, threads) in enumerate(runs):
        table = tables[name]
        job = policy_job(task, tmp_path / f"run-{number}", table, dtype=dtype, deterministic=True, microbatch_size=1)
        found.append(run(job, plan, threads))
    for each, other in zip(runs[1:], found[1:], strict=True):
        assert not differs(found[0], other), each
