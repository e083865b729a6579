"""The plan that is taken where copies of steps find no room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.unit.planner.measured.test_survey import SPEC, survey_of, training_node
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.core.errors import CapacityError, ConfigError
from tllm.kernels.library import library
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.measured.survey import cluster_of
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.memory.role_memory import rollout_bytes
from tllm.planner.search.training_search import TrainingSearchResult
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.job.job_file import ResolvedJob, read_job
from tllm.training.job.job_parts import check_no_auto

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
    placed = chooser._that_fits(lambda: chooser.best(CLUSTER)).choices[0].placed
    assert placed.facts.mirror_steps == 0 and not chooser.mirrored, "and so is what is said of it later"
    asked = Tight(job(tmp_path, "mirror_steps=1"), "{}", SPEC, 2, mirrored=True)
    with pytest.raises(CapacityError, match="with copies"):
        asked._that_fits(lambda: asked.best(CLUSTER))


def test_the_nodes_that_were_chosen_for_a_role_are_named_in_the_job(tmp_path: Path) -> None:
    survey = survey_of("train", *(training_node(name) for name in "abc"))
    for asked, count in (("1", 1), ("2", 2), ("b", 1)):
        sets = ("task=grpo", "grpo.reward_funcs=r:f", "grpo.max_completion_length=8", f"grpo.rollout_nodes={asked}")
        chooser = TrainingChooser(job(tmp_path, *sets), "{}", SPEC, 3)
        assert chooser.facts().sampling is None and chooser.facts().lengths == chooser.facts(apart=()).lengths
        said: list[str] = []
        chooser.says = said.append
        placed = chooser.decide(survey).placed
        assert chooser.resolved.job.grpo is not None and placed.facts.sampling is not None
        names = chooser.resolved.job.grpo.rollout_nodes
        assert len(names) == count and "a" not in names, "who has the data trains"
        assert names == tuple(placed.cluster.name(device) for device in placed.facts.sampling.servers)
        assert set(placed.devices).isdisjoint(placed.facts.sampling.servers) and 0 in placed.devices
        assert f"rollout: {' '.join(map(str, names))}" in said[0] and "seconds of a step by role: sampling" in said[0]
        assert asked.isdecimal() or names == ("b",)
        again = chooser.best_as_chosen(placed.cluster, (2,)).placed
        assert again.facts.sampling == placed.facts.sampling, "a role stays where it is"


def test_the_plan_by_which_nodes_divide_a_model_is_written_in_the_job(tmp_path: Path) -> None:
    """Where none of two has room for all of it."""
    sets = ("task=grpo", "grpo.reward_funcs=r:f", "grpo.max_completion_length=8", "grpo.rollout_nodes=2")
    chooser = TrainingChooser(job(tmp_path, *sets, "grpo.rollout_plan=auto"), "{}", SPEC, 3)
    small = TRAINER_BYTES + int(0.9 * rollout_bytes(SPEC, chooser.facts(apart=())))
    nodes = [msgspec.structs.replace(training_node(name), memory_bytes=small) for name in "bc"]
    said: list[str] = []
    chooser.says = said.append
    chosen = chooser.decide(survey_of("train", training_node("a"), *nodes))
    table = chooser.resolved.job.grpo
    assert table is not None and table.rollout_nodes == ("b", "c")
    assert Plan.parse(table.rollout_plan, SPEC.num_layers).world_size == 2
    assert f"rollout: b c (by {table.rollout_plan}, " in said[0]
    told = chooser.predicted_seconds(chosen.placed, chosen.predicted)
    assert told.plan == str(chosen.placed.plan) and told.by_role.keys() == {"step", "sampling", "policy"}
    assert told.by_role["step"] == pytest.approx(told.by_role["sampling"] + told.by_role["policy"])
    with pytest.raises(ConfigError, match=r'grpo\.rollout_plan is "auto", and nobody chooses'):
        check_no_auto(replace(chooser.resolved.job, grpo=replace(table, rollout_plan="auto")), "nobody chooses")


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

    known, has_pass = facts(plain, wide), library() is not None
    assert known.shared_prompts, "which would not be rounded as the engine rounds it"
    assert facts(same, wide) == replace(known, deterministic=True, value_pass=has_pass, shared_prompts=None)
    assert not facts(same, replace(SPEC, head_dim=5)).value_pass, "no kernel takes such heads"
    assert not facts(job(tmp_path, "deterministic=true"), wide).value_pass, "nothing is sampled"
