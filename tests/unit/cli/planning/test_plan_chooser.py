"""The plan that is taken where copies of steps find no room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.planner.measured.test_survey import SPEC, survey_of, training_node
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.core.errors import CapacityError
from tllm.kernels.library import library
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.measured.survey import cluster_of
from tllm.planner.search.training_search import TrainingSearchResult
from tllm.spec.model_spec import ModelSpec
from tllm.training.job.job_file import ResolvedJob, read_job

CLUSTER = cluster_of(survey_of("train", training_node("a"), training_node("b")), SPEC)


class Tight(TrainingChooser):
    """Nothing fits with copies."""

    def best(self, cluster: Cluster, sizes: tuple[int, ...] = ()) -> TrainingSearchResult:
        if self.facts().mirror_steps:
            raise CapacityError("no plan fits with copies")
        return super().best(cluster, sizes)


def job(folder: Path, *sets: str) -> ResolvedJob:
    given = (f"output_dir={folder}", "train_files=rows.jsonl", "config_name=c.json", "max_steps=1", "seq_len=32")
    return read_job(None, [*given, "microbatch_size=2", *sets])


def test_a_plan_without_copies_is_better_than_none_unless_they_were_asked_for(tmp_path: Path) -> None:
    chooser = Tight(job(tmp_path), "{}", SPEC, 2, mirrored=True)
    placed = chooser._best_that_fits(CLUSTER).choices[0].placed
    assert placed.facts.mirror_steps == 0 and not chooser.mirrored, "and so is what is said of it later"
    asked = Tight(job(tmp_path, "mirror_steps=1"), "{}", SPEC, 2, mirrored=True)
    with pytest.raises(CapacityError, match="with copies"):
        asked._best_that_fits(CLUSTER)


def test_a_plan_that_is_given_is_only_foretold(tmp_path: Path) -> None:
    assert not Tight(job(tmp_path), "{}", SPEC, 2).choice().is_given
    plan = Tight(job(tmp_path), "{}", SPEC, 2).best(CLUSTER).choices[0].placed.plan
    assert Tight(job(tmp_path), "{}", SPEC, 2, plan).choice().is_given


def test_the_second_forward_pass_of_a_deterministic_run_counts_where_there_is_one(tmp_path: Path) -> None:
    task = ("task=grpo", "grpo.reward_funcs=rewards.py:right", "grpo.max_completion_length=8", "mirror_steps=0")
    wide = replace(SPEC, head_dim=32)
    plain, same = job(tmp_path, *task), job(tmp_path, *task, "deterministic=true")

    def facts(chosen: ResolvedJob, spec: ModelSpec) -> TrainingFacts:
        return TrainingChooser(chosen, "{}", spec, 2).facts()

    assert facts(same, wide) == replace(facts(plain, wide), deterministic=True, value_pass=library() is not None)
    assert not facts(same, replace(SPEC, head_dim=5)).value_pass, "no kernel takes such heads"
    assert not facts(job(tmp_path, "deterministic=true"), wide).value_pass, "nothing is sampled"
