"""Log-probabilities of completions that an engine samples under one plan, as a trainer finds them under another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.models.layouts import in_threads
from tests.support.training.local_links import local_links
from tests.support.training.post_training.policy_task import grpo
from tllm.comm.links.link import Link
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.scheduler import Scheduler
from tllm.model.transformer import Transformer
from tllm.node.roles import colocated_rollouts as role
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan, Wire
from tllm.training.data.batch_tensors import Tokens, tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.job.job import Job
from tllm.training.objectives.objective import MicrobatchLoss
from tllm.training.objectives.policy_gradient import SAMPLED, PolicyGradientLoss, SampledTokenLosses
from tllm.training.policy.rewarded_rows import completion_row
from tllm.training.policy.rollouts import Completion, PromptGroup, sampling_of
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig, groups_of
from tllm.training.step.rank_model import RankModel
from tllm.weights.byte_source import LocalFiles

PROMPTS, GENERATIONS = (5, 19, 34), 4
"""Tokens of each prompt, and completions of each."""
PLACE = "place"


class RecordedLogProbs:
    """An `Objective` without a loss that notes each token's log-probability by its `PLACE`."""

    metric_names: tuple[str, ...] = ()

    def __init__(self, losses: SampledTokenLosses, found: Tensor) -> None:
        self.losses, self.found = losses, found

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        log_probs_T = self.losses.log_probs(model, x_TD, tokens)
        learned_T = tokens.labels_T != IGNORED
        self.found[tokens.of_tokens[PLACE][learned_T].long()] = log_probs_T[learned_T].double()
        return MicrobatchLoss(log_probs_T.sum())


class ToldScheduler(Scheduler):
    """What an engine has met: sequences that were preempted, and tokens of prompts that were in the cache."""

    met: dict[str, int]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        ToldScheduler.met = {}

    def schedule(self) -> Any:
        step = super().schedule()
        cache = self.pages.prefix_cache
        ToldScheduler.met = {"preempted": self.preemptions, "cached": 0 if cache is None else cache.hits}
        return step


def job_of(folder: Path, dtype: str, deterministic: bool = False, **table: Any) -> Job:
    """One step of GRPO over what `folder` has."""
    return Job(
        output_dir=str(folder / "run"),
        train_files=("none",),
        max_steps=1,
        model_name_or_path=str(folder),
        task="grpo",
        grpo=grpo(folder, **{"num_generations": GENERATIONS, "max_completion_length": 24, **table}),
        seq_len=64,
        global_batch_size=len(PROMPTS) * GENERATIONS,
        dtype=dtype,
        deterministic=deterministic,
    )


def under(plan_text: str, job: Job, each: Callable[[RankConfig, RankModel], Any]) -> list[Any]:
    """What each rank of a plan makes of the model of the job, whose ranks are threads."""
    folder = Path(str(job.model_name_or_path))
    raw = read_config(folder)
    spec = spec_from_config(raw)
    plan = Plan.parse(plan_text, spec.num_layers)
    links = local_links(plan)

    def rank(number: int) -> Any:
        mine: dict[Wire, Link] = {wire: link for wire, link in links.items() if number in wire[:2]}
        config = RankConfig(job, plan, spec, number, groups_of(plan, number, mine))
        model = RankModel(config)
        try:
            fill = InitialWeights(LocalFiles(folder), config=raw).filler(spec, 0, job.dtype)
            for chunk in model.chunks:
                fill(chunk)
            return each(config, model)
        finally:
            for link in mine.values():
                link.close()
            model.close()

    return in_threads([partial(rank, number) for number in range(plan.world_size)])


def sampled_rows(plan_text: str, job: Job) -> list[PackedRow]:
    """Rows of the completions that an engine under this plan samples, of prompts that are always the same."""
    dice = random.Random(5)
    vocabulary = spec_from_config(read_config(Path(str(job.model_name_or_path)))).vocab_size
    prompts = [tuple(dice.randrange(vocabulary) for _ in range(count)) for count in PROMPTS]
    groups = [PromptGroup(ids, tuple(range(9 * at, 9 * at + GENERATIONS))) for at, ids in enumerate(prompts)]

    def sample(config: RankConfig, model: RankModel) -> list[Completion]:
        return role.colocated_rollouts(config, model).sample(groups, (), sampling_of(job))

    completions = under(plan_text, job, sample)[0]
    rows = [completion_row(prompts[at // GENERATIONS], one, advantage=0.0) for at, one in enumerate(completions)]
    return [with_places(row, 64 * at) for at, row in enumerate(rows)]


def with_places(row: PackedRow, first: int) -> PackedRow:
    places = np.arange(first, first + len(row.input_ids))
    return replace(row, of_tokens={**row.of_tokens, PLACE: places})


def told(rows: Sequence[PackedRow]) -> Tensor:
    """The engine's log-probabilities of all completions, token by token."""
    return torch.cat([torch.from_numpy(row.of_tokens[SAMPLED][row.labels != IGNORED]) for row in rows])


def trained(plan_text: str, job: Job, rows: Sequence[PackedRow], packed: int = 3) -> Tensor:
    """A trainer's of the same tokens, with so many rows in each microbatch."""
    found = torch.full((64 * len(rows),), torch.nan, dtype=torch.float64)

    def score(config: RankConfig, model: RankModel) -> None:
        replica, replicas = config.plan.coordinates(config.rank).replica, config.plan.replicas
        mine = rows[replica::replicas]
        microbatches = [tokens_of(mine[at : at + packed]) for at in range(0, len(mine), packed)]
        assert isinstance(model.objective, PolicyGradientLoss)
        model.forward_only(microbatches, RecordedLogProbs(model.objective.losses, found))

    under(plan_text, job, score)
    places = [row.of_tokens[PLACE][row.labels != IGNORED] for row in rows]
    return found[torch.from_numpy(np.concatenate(places))]


def starve(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Give engines less: pages for some of the sequences, batches that cut prompts."""
    plenty = role.rollout_limits

    def scarce(config: RankConfig) -> Limits:
        return msgspec.structs.replace(plenty(config), **limits)

    monkeypatch.setattr(role, "rollout_limits", scarce)
    monkeypatch.setattr(role, "Scheduler", ToldScheduler)
