"""Runs of an experiment, and what one seed of it found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.report.curves import Points
from tests.support.training.post_training.letter_languages import opened
from tests.support.training.runs import records, saved, train
from tllm.training.job.job import Job
from tllm.training.report.metrics import StepRecord


@dataclass(frozen=True)
class Found:
    """What one seed found: figures and curves by their names."""

    figures: Mapping[str, float]
    curves: Mapping[str, Points]

    def raw(self) -> dict[str, Any]:
        return {"figures": dict(self.figures), "curves": {name: list(points) for name, points in self.curves.items()}}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Rows as a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(job: Job) -> list[StepRecord]:
    """Every step of the job, as a rank of `tllm train` takes it, in this process."""
    return records(train(job, "pp=1"))


def evaluated_before(job: Job) -> StepRecord:
    """What the job's evaluation finds before its first step: after a step at a learning rate of nothing."""
    first = replace(
        job, output_dir=f"{job.output_dir}-before", max_steps=1, save_steps=1, learning_rate=0.0, warmup_steps=0
    )
    return run(first)[-1]


def losses(before: StepRecord, steps: Sequence[StepRecord]) -> Points:
    """The loss of rows held out by step, from before the first one on."""
    evaluated = [(0.0, before.eval_loss), *((float(one.step), one.eval_loss) for one in steps)]
    return [(step, loss) for step, loss in evaluated if loss is not None]


def metrics(name: str, before: StepRecord, steps: Sequence[StepRecord]) -> Points:
    """A metric of rows held out by step, from before the first one on."""
    evaluated = [(0.0, before.eval_metrics), *((float(one.step), one.eval_metrics) for one in steps)]
    return [(step, told[name]) for step, told in evaluated if told is not None]


def opened_save(run_folder: Path, step: int) -> transformers.PreTrainedModel:
    """A save of a finished run, by `transformers`."""
    model = opened(run_folder / "final")
    missing = model.load_state_dict(saved(run_folder, step), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    return model


@torch.no_grad()
def sampled(model: transformers.PreTrainedModel, prompts_BT: torch.Tensor, longest: int, end: int) -> torch.Tensor:
    """Completions at a temperature of 1, without their prompts, [prompts, longest]; after an end there are ends."""
    generate: Any = model.generate
    ids_BT = generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=longest,
        eos_token_id=end,
        pad_token_id=end,
    )
    completions_BT = ids_BT[:, prompts_BT.shape[1] :]
    return torch.nn.functional.pad(completions_BT, (0, longest - completions_BT.shape[1]), value=end)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What torch draws here is drawn from `seed`, and nothing drawn elsewhere changes by it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
