"""The plan that is taken where copies of steps find no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.planner.measured.test_survey import SPEC, survey_of, training_node
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.core.errors import CapacityError
from tllm.planner.cluster.device import Cluster
from tllm.planner.measured.survey import cluster_of
from tllm.planner.search.training_search import TrainingSearchResult
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
