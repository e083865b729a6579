"""Whole training runs, their ranks as threads of this process; and the same by a plain loop over `transformers`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.support.models.layouts import in_threads
from tests.support.training.local_links import local_links
from tllm.comm.links.link import Link
from tllm.comm.nccl.device_backend import DeviceBackend
from tllm.devices.choose import CPU
from tllm.node.roles.colocated_rollouts import colocated_rollouts
from tllm.spec.plan import Plan, Wire
from tllm.spec.process_groups import computing
from tllm.training import trainer as trainer_module
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.parameter_server.server_run import ParameterServerRun
from tllm.training.report.events import RunEvent, RunStepped
from tllm.training.report.metrics import StepRecord
from tllm.training.state.initial_weights import STD, InitialWeights
from tllm.training.step.rank_groups import RankConfig, groups_of, on_devices
from tllm.training.trainer import RankTrainer
from tllm.weights.byte_source import LocalFiles

IsStopped = Callable[[], bool]


def rows_file(path: Path, count: int = 96, longest: int = 24, vocab: int = 101, seed: int = 1) -> Path:
    """Rows of random ids with lengths of their own."""
    dice = random.Random(seed)
    lines = ({"input_ids": [dice.randrange(vocab) for _ in range(dice.randint(3, longest))]} for _ in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def job_for(model: Path, run: Path, **more: Any) -> Job:
    """A short job over random rows in file order, without packing."""
    rows = rows_file(run.parent / "rows.jsonl")
    fields = dict(
        model_name_or_path=str(model),
        train_files=(str(rows),),
        output_dir=str(run),
        max_steps=6,
        seq_len=24,
        global_batch_size=8,
        learning_rate=1e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        shuffle=False,
        packing=False,
        save_steps=4,
    )
    return Job(**{**fields, **more})


def short_job(model: Path, run: Path, **more: Any) -> Job:
    """The same with half the rows in a step, of which two, three and four replicas or stages have a part each, in fewer
    steps: enough for one that goes on from a save of another."""
    return job_for(model, run, **{"global_batch_size": 4, "max_steps": 4, "save_steps": 3, **more})


def train(
    job: Job,
    plan_text: str,
    is_stopped: IsStopped = lambda: False,
    folders: Sequence[Path] = (),
    damage: Callable[[RankTrainer], None] = lambda trainer: None,
    devices: Sequence[torch.device] = (CPU,),
    backend: DeviceBackend | None = None,
) -> list[RunEvent]:
    """Run the job under a plan; what rank 0 told. `folders` are the nodes' own, rank by rank, if they share no disk.

    Ranks have the `devices` in turn. A `backend` connects these, as if all ranks were on one machine.
    """
    beginning = open_initial_model(job)
    plan = Plan.parse(plan_text, beginning.spec.num_layers)
    links, news = local_links(plan), list[RunEvent]()
    std = float(beginning.config.get("initializer_range") or STD)

    def rank(number: int) -> None:
        mine: dict[Wire, Link] = {wire: link for wire, link in links.items() if number in wire[:2]}
        own = replace(job, output_dir=str(folders[number % len(folders)])) if folders else job
        source = None if job.model_name_or_path is None else LocalFiles(job.model_name_or_path)
        trainer: RankTrainer | ParameterServerRun | None = None
        try:
            first, groups = beginning if number == 0 else None, groups_of(plan, number, mine)
            if backend is not None:
                groups = on_devices(groups, plan, number, "here", devices[number % len(devices)], 20.0, backend)
            config = RankConfig(own, plan, beginning.spec, number, groups, devices[number % len(devices)])
            if number in computing(plan):
                trainer = RankTrainer(config, InitialWeights(source, std), first, None, colocated_rollouts)
            else:
                trainer = ParameterServerRun(config)
            trainer.prepare()
            if isinstance(trainer, RankTrainer):
                damage(trainer)
            trainer.run(news.append if number == 0 else lambda one: None, is_stopped)
        finally:
            for link in mine.values():
                link.close()
            if trainer is not None:
                trainer.close()
            if source is not None:
                source.close()

    with short_peak():
        in_threads([partial(rank, number) for number in range(plan.world_size)])
    return news


def short_peak() -> AbstractContextManager[object]:
    """What the device can do at best is measured in a moment and not in 0.3 s, all ranks at once: runs here have a
    second of work."""
    return mock.patch.object(trainer_module, "PEAK_SECONDS", 0.01)


def records(news: Sequence[RunEvent]) -> list[StepRecord]:
    return [one.record for one in news if isinstance(one, RunStepped)]


def final(run: Path) -> dict[str, Tensor]:
    """The finished model's tensors."""
    return {name: x for file in sorted((run / "final").glob("*.safetensors")) for name, x in load_file(file).items()}


def saved(run: Path, step: int) -> dict[str, Tensor]:
    """The model's tensors of a save."""
    opened = open_folder(run / f"step-{step}")
    return {name: opened.whole(name) for name in opened.model_names}


def plain_loop(job: Job, model: transformers.PreTrainedModel) -> list[float]:
    """The losses of a loop that anybody would write, over the same rows; the model is trained in place."""
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    kept = [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=decayed, weight_decay=job.weight_decay), dict(params=kept, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=job.learning_rate)
    rates = transformers.get_scheduler(job.lr_scheduler_type, optimizer, job.warmup_steps, job.max_steps)
    rows = [json.loads(line)["input_ids"] for line in Path(job.train_files[0]).read_text().splitlines()]
    losses = []
    for step in range(job.max_steps):
        start = step * job.global_batch_size
        batch = [torch.tensor(rows[i % len(rows)]) for i in range(start, start + job.global_batch_size)]
        tokens = sum(len(ids_T) - 1 for ids_T in batch)
        loss = 0.0
        for ids_T in batch:
            logits = model(ids_T[None]).logits[0, :-1]
            part = F.cross_entropy(logits, ids_T[1:], reduction="sum") / tokens
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(loss)
    return losses
