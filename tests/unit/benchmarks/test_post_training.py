"""What post-training beside TRL is given, when its contenders are found unlike, and what its page says of a run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from benchmarks.models.random_llama import model_folder
from benchmarks.models.word_tokenizer import add_word_tokenizer, words
from benchmarks.training.even_words import even_words
from benchmarks.training.post_training import ONCE, OURS, PEER, ROWS, TASKS, our_job, page, unlike, weights_read
from benchmarks.training.throughput import Raw
from benchmarks.training.tllm_rank import EndlessRollouts
from tllm.text.tokenizer import Tokenizer
from tllm.training.job.job import Job
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder


def reports(*seconds: float, loss: float = 2.0, length: float = 0.0) -> list[dict[str, object]]:
    """Of turns of one step, the first of which warms up."""
    return [dict(seconds=each, losses=[loss], length=length, reward=0.5, sampling=length and 0.25) for each in seconds]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_word_tokenizer(model_folder("tiny", tmp_path_factory.mktemp("models"), torch.float32))


def test_a_text_of_words_has_as_many_tokens_and_ends_nowhere_by_itself(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    text = words(random.Random(1), 100, 256)
    ids = tokenizer.encode(text)
    assert len(ids) == 100 and not set(ids) & {0, *tokenizer.eos_ids}
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(f"{text} {text}") == ids + ids, "a prompt and its reply are encoded apart or as one"


@pytest.mark.parametrize("task", TASKS)
def test_both_sides_are_given_the_same_rows_and_a_job_that_holds_them(task: str, tmp_path: Path) -> None:
    rows = ROWS[task]
    first = rows.write(task, tmp_path / "a", 256).read_text()
    assert first == rows.write(task, tmp_path / "b", 256).read_text()
    (row, *_) = map(json.loads, first.splitlines())
    job = msgspec.convert(
        {**our_job(task, "float32", rows), "output_dir": "o", "train_files": ["t"], "max_steps": 1, "config_name": "c"},
        Job,
    )
    assert job.global_batch_size == rows.batch
    count = sum(
        len(text.split()) for name, text in row.items() for _ in range(2 if (task, name) == ("dpo", "prompt") else 1)
    )
    ends = {"sft": 1, "dpo": 2, "grpo": 0}[task]
    generated = rows.reply if task == "grpo" else 0
    assert count + ends + generated == job.seq_len, "a row fills what the job allows, and no more"


def test_contenders_with_other_losses_or_shorter_completions_are_named() -> None:
    near: Raw = {OURS: reports(1, 1), PEER: reports(1, 1, loss=2.0 * (1 + 5e-6))}
    assert unlike("sft", "float32", near) == []
    far: Raw = {OURS: reports(1, 1), PEER: reports(1, 1, loss=2.001)}
    assert len(unlike("sft", "float32", far)) == 2
    assert unlike("dpo", "bfloat16", far) == [], "rounding goes as far in bfloat16"
    length = float(ROWS["grpo"].reply)
    whole: Raw = {OURS: reports(1, length=length), PEER: reports(1, length=length, loss=9.0)}
    assert unlike("grpo", "float32", whole) == []
    (fault,) = unlike("grpo", "float32", {**whole, PEER: reports(1, length=length - 0.5)})
    assert fault.startswith(PEER) and str(length - 0.5) in fault


def test_the_page_has_the_ratio_of_each_round_and_names_aims_that_are_missed() -> None:
    grpo = ROWS["grpo"]
    runs = {
        "dpo": {"float32": {OURS: reports(9, 2, 1), PEER: reports(9, 4, 2), ONCE: reports(9, 1, 0.5)}},
        "grpo": {"float32": {OURS: reports(1, 1, length=grpo.reply), PEER: reports(1, 4, length=grpo.reply)}},
    }
    rate = grpo.reply * weights_read("tiny", "float32") / 0.25 / 1e9  # sampling then takes 0.25 s, as it does here
    made = page({"size": "tiny", "versions": "TRL 1", "runs": runs, "read_rate": rate})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.table.splitlines()]
    cells = {(line[0], line[2]): line[3:] for line in lines}
    assert cells["DPO", OURS] == ["3.00", "", ""], "the median of 4 pairs in 2 s and 4 in 1 s"
    assert cells["DPO", PEER] == ["1.50", "2.00", ""]
    assert cells["DPO", ONCE] == ["6.00", "0.50", ""]
    assert cells["GRPO", PEER] == ["2.00", "4.00", "6.2 %"]
    assert "DPO in float32 has 0.50 (TRL, reference once)" in made.limits and "GRPO in float32 has" not in made.limits
    assert "GRPO in float32 would reach 4.0 times if sampling took as long as reading" in made.limits
    assert "(0.25 s a step at 0.1 GB/s), and 5.3 times if it took no time." in made.limits, (
        "4 s beside 0.75 s of learning"
    )
    assert "Not run: SFT in float32, SFT in bfloat16, DPO in bfloat16, GRPO in bfloat16." in made.limits
    assert "2.00 times TRL, 2.00 to 2.00 in single rounds" in made.meaning and "in bfloat16 at" not in made.meaning


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_step_reads_all_weights_but_the_embedding_and_the_few_of_norms(dtype: str, size: int, folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
    matrices = [rows * columns for name, (rows, *rest) in found.items() for columns in rest if "embed" not in name]
    assert weights_read("tiny", dtype) == sum(matrices) * size


def test_nothing_ends_a_completion_of_the_benchmark() -> None:
    asked = []

    class Sampler:
        def share(self, order: RolloutOrder) -> list[PromptGroup]:
            raise AssertionError("not asked")

        def sample(
            self, groups: list[PromptGroup], stop_ids: tuple[int, ...], sampling: CompletionSampling
        ) -> list[Completion]:
            asked.append(tuple(stop_ids))
            return []

        def close(self) -> None:
            asked.append("closed")

    rollouts = EndlessRollouts(Sampler())
    rollouts.sample([], (2,), CompletionSampling(4))
    rollouts.close()
    assert asked == [(), "closed"]


def test_the_reward_is_the_part_of_even_tokens() -> None:
    assert even_words(completion_ids=[[2, 4, 5, 7], [8]], prompts=["a", "b"]) == [0.5, 1.0]
