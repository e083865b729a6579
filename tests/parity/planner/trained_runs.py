"""What a run's ranks send and hold beside what is planned for them."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.support.models.live_tensors import Live
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.cost.traffic import Traffic, step_traffic
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.step import rank_model
from tllm.training.trainer import RankTrainer


def planned_traffic(spec: ModelSpec, plan: Plan, facts: TrainingFacts) -> dict[int, Traffic]:
    """What each rank is planned to send in a step, by its number."""
    each = zip(rank_works(spec, plan, facts), step_traffic(spec, plan, facts), strict=True)
    return {work.rank: sent for work, sent in each}


def sent_in_a_step(trainer: RankTrainer, group: Literal["tp", "cp"]) -> float:
    """Bytes that a rank sent over one of its groups, as a mean over the steps of its run."""
    links = getattr(trainer.config.groups, group).send.values()
    return float(sum(link.bytes_moved for link in links) / trainer.config.job.max_steps)


def watch_peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes of tensors that live during the passes of each step, as steps are made from now on."""
    peaks, run_schedule = list[int](), rank_model.run_schedule

    def measured(*arguments: Any) -> Any:
        with Live() as live:
            result = run_schedule(*arguments)
        peaks.append(live.peak)
        return result

    monkeypatch.setattr(rank_model, "run_schedule", measured)
    return peaks
