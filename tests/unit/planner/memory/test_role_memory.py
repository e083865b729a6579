"""What sampling, a reference and a teacher take of a training rank's memory, beside what really holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.unit.planner.search.test_serving_search import spec_of as small_spec
from tllm.cli.planning.role_wishes import answer_bytes
from tllm.comm.collectives.group import local_groups
from tllm.core.errors import CapacityError, PlanError
from tllm.engine.compute.kv_cache import KVCache
from tllm.model.transformer import Transformer
from tllm.node.roles.colocated_rollouts import rollout_limits
from tllm.parallel.mesh import Mesh, mesh_of
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cost.flops import attention_flops, training_flops
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import JudgeFacts, TrainingFacts, rank_works
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.memory.role_memory import judge_parts, role_memory
from tllm.planner.memory.training_memory import rank_totals, training_bytes
from tllm.planner.search.training_layouts import TrainingConstraints
from tllm.planner.search.training_search import best_training
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.data.packing import RowLengths
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.job_parts import JudgeSpecs, shares_prompts, training_facts, with_role_plans
from tllm.training.job.rollout_keys import GRPOConfig, RejectionConfig
from tllm.training.objectives.hidden_state_loss import HiddenStateLoss
from tllm.training.step.model_chunks import build_chunks

REWARDS = ("rewards.py:one",)


def job_of(**more: Any) -> Job:
    table = GRPOConfig(REWARDS, num_generations=4, max_completion_length=20, max_num_seqs=6)
    fields = dict(task="grpo", grpo=table, seq_len=50, global_batch_size=16, microbatch_size=2)
    return Job(output_dir="run", train_files=("a",), max_steps=1, model_name_or_path="m", **{**fields, **more})


@pytest.mark.parametrize("text", ["pp=1", "pp=2", "tp=2", "dp=2,pp=2,tp=1+2"])
@pytest.mark.parametrize("case", ["llama", "deepseek_v3_moe", "qwen3_next_moe", "gemma4_moe"])
def test_the_cache_of_a_run_that_samples_is_counted_to_the_byte(case: str, text: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec, job = spec_of(tmp_path), job_of()
    plan = Plan.parse(text, spec.num_layers)
    limits = rollout_limits(SimpleNamespace(job=job, spec=spec, plan=plan))  # type: ignore[arg-type]
    assert limits.num_pages == 6 * 4, "six completions of fifty tokens"
    for work in rank_works(spec, plan, training_facts(job)):
        _, place = plan.place(work.rank % plan.replica_size)
        mesh = mesh_of(spec, plan, work.rank, local_groups(work.tp)[place])
        (model,) = build_chunks(spec, mesh, plan.runs, torch.float32, "meta")
        cache = KVCache(model.attention_specs(), limits, torch.float32, model.state_shapes())
        held = cache.num_bytes + sum(x.nbytes for state in cache.states.layers.values() for x in state)
        assert role_memory(spec, training_facts(job), work).cache == held


def test_a_shared_prompt_is_counted_once_for_the_completions_of_a_microbatch() -> None:
    """Prompts of 30 tokens and completions of 20: 29 + 20 for each, the last token of the prompt the first of these."""
    spec, plan = small_spec(4), Plan.parse("pp=1", 4)
    (whole,) = cut_stage(spec, (1,))
    for size, lengths, before in (
        (1, (50,), (0,)),
        (4, (29, 20, 20, 20, 20), (0, 29, 29, 29, 29)),
        (6, (29, 20, 20, 20, 20, 29, 20, 20), (0, 29, 29, 29, 29, 0, 29, 29)),
    ):
        job = job_of(microbatch_size=size)
        assert shares_prompts(job, spec)
        plain, facts = training_facts(job), training_facts(job, shares_prompts=True)
        assert (facts.lengths, facts.before) == (lengths, before) and plain.lengths == (50,) * size
        assert facts.in_ring(2).lengths == plain.lengths
        assert replace(facts, sampling=None).lengths == lengths, "whoever samples"
        (work,), (more,) = (rank_works(spec, plan, one) for one in (facts, plain))
        assert work.batch.target_tokens == more.batch.target_tokens == 20 * size
        of_group = attention_flops(spec, spec.layers[0], whole, lengths, before)
        of_row = attention_flops(spec, spec.layers[0], whole, [49])
        of_prompt = attention_flops(spec, spec.layers[0], whole, [29])
        if size > 1:
            assert of_group == of_row * size - of_prompt * (size - lengths.count(29))
        (few,), (many,) = (training_bytes(spec, plan, one) for one in (facts, plain))
        assert few.activations < many.activations or size == 1


def test_the_prompt_of_a_pair_is_counted_once_and_memory_for_whole_rows() -> None:
    """Rows of 64 tokens, each of which two pairs fill: prompts of 12 tokens, of which 11 once, and two replies of 4."""
    spec, plan, pairs = small_spec(4), Plan.parse("pp=1", 4), RowLengths(11.5, 4.0, 2)
    job = job_of(task="dpo", grpo=None, seq_len=64, packing=True)
    assert shares_prompts(job, spec)
    plain, facts = training_facts(job), training_facts(job, shares_prompts=True, lengths=pairs)
    assert plain == training_facts(job, shares_prompts=True), "nobody knows how long they are"
    assert facts.lengths == (11, 4, 4) * 4 and facts.before == (0, 11, 11) * 4, "two rows are a microbatch"
    assert plain.lengths == (64, 64) and facts.microbatches == plain.microbatches
    assert facts.in_ring(2).lengths == (16,) * 8, "a ring shares no prompts"
    (few,), (many,) = (rank_works(spec, plan, one) for one in (facts, plain))
    assert (few.batch.target_tokens, many.batch.target_tokens) == (2 * 16, 2 * 64), "replies alone have logits"
    assert training_bytes(spec, plan, facts) == training_bytes(spec, plan, plain), "a row may have hardly a prompt"
    device = Device(2**32, (("float32", ((1.0, 1e10),)),), 1e10, logits_rates=(("float32", ((1.0, 1e10),)),))
    machine = Cluster(("n0",), (device,), (0,), (None,))
    once, twice = (PlacedPlan(spec, plan, one, machine, (0,)) for one in (facts, plain))
    ratio = training_flops(spec, facts.lengths, 32, before=facts.before) / training_flops(spec, (64, 64), 128)
    seconds, whole = once.predict().seconds, twice.predict().seconds
    assert ratio < 0.7 and seconds / whole == pytest.approx(ratio)
    assert once.mfu(seconds) == pytest.approx(twice.mfu(whole)), "both compute at the same rate"
    one_pair = training_facts(
        job_of(task="dpo", grpo=None, seq_len=64, packing=False), shares_prompts=True, lengths=pairs
    )
    assert one_pair.lengths == (11, 4, 4) * 2, "a row is no longer than its pair"


def test_a_reference_takes_the_weights_again_but_not_under_an_adapter() -> None:
    spec, plain = small_spec(4), training_facts(job_of())
    held = training_facts(job_of(grpo=replace(job_of().grpo or GRPOConfig(REWARDS), beta=0.1)))
    for text in ("pp=2", "tp=2", "dp=2,zero=2"):
        plan = Plan.parse(text, 4)
        for before, after in zip(training_bytes(spec, plan, plain), training_bytes(spec, plan, held), strict=True):
            assert after.reference == before.weights and after.total == before.total + before.weights
    beside = replace(held, adapter=AdapterFacts(4))
    assert [rank.reference for rank in training_bytes(spec, Plan.parse("pp=1", 4), beside)] == [0]


def test_a_teacher_is_held_by_rank_0_alone() -> None:
    spec, teacher, plan = small_spec(2), small_spec(6), Plan.parse("dp=2", 2)
    facts = TrainingFacts(64, 8, teacher=JudgeFacts(teacher, "bfloat16", 8 * 64, 64))
    first, second = training_bytes(spec, plan, facts)
    (whole,) = training_bytes(teacher, Plan.parse("pp=1", 6), TrainingFacts(64, 8, dtype="bfloat16"))
    assert second.teacher == 0 and first.teacher > whole.weights
    assert first.teacher < 1.35 * whole.weights, "and one row under way, whose logits are there four times"
    assert rank_totals(spec, plan, facts) == (first.total, second.total)


def test_projections_of_hidden_states_are_counted_where_they_are_and_what_is_told_of_them() -> None:
    spec, teacher = small_spec(4), small_spec(6)
    states = DistillationKeys("t", hidden_state_layers=((0, 1), (2, 1), (-1, -1)), teacher_hidden_size=16)
    job = Job("run", ("a",), max_steps=1, model_name_or_path="m", task="distill", distill=states, seq_len=32)
    facts = training_facts(job, judges=JudgeSpecs(teacher))
    plain = replace(facts, projections=None)
    held = [sum(p.elements for unit in work.learned(spec) for p in unit) for work in rank_works(spec, PP2, facts)]
    bare = [sum(p.elements for unit in work.learned(spec) for p in unit) for work in rank_works(spec, PP2, plain)]
    each = 16 * spec.hidden_size
    assert [a - b for a, b in zip(held, bare, strict=True)] == [each, 2 * each]
    losses = [HiddenStateLoss(states, mesh, chunks, torch.float32) for mesh, chunks in stages(spec)]
    assert [sum(p.numel() for p in loss.parameters()) for loss in losses] == [each, 2 * each]
    without = replace(facts, teacher=replace(facts.teacher or JudgeFacts(teacher, "", 0, 0), told=0))
    told = [
        a.teacher - b.teacher for a, b in zip(*(training_bytes(spec, PP2, f) for f in (facts, without)), strict=True)
    ]
    assert told == [32 * 2 * 16 * 4, 0] and answer_bytes(job, 101) == 32 * (64 * 6 + 4) + told[0]


def test_every_rank_that_has_logits_of_a_divided_teacher_has_those_of_all_tokens() -> None:
    """3.1 to 4.2 copies of those of 128 tokens were measured, of one rank and of each of two."""
    wide = JudgeFacts(replace(small_spec(2), vocab_size=2**18), "float32", 512, 512)
    first, last = judge_parts(replace(wide, plan=Plan.parse("pp=2", 2)))
    assert min(last, *judge_parts(replace(wide, plan=Plan.parse("tp=2", 2)))) > 4 * 4 * 128 * 2**18 > first


PP2 = Plan.parse("pp=2", 4)


def stages(spec: ModelSpec) -> Iterator[tuple[Mesh, list[Transformer]]]:
    for rank in (0, 1):
        mesh = mesh_of(spec, PP2, rank, local_groups(1)[0])
        yield mesh, build_chunks(spec, mesh, PP2.runs, torch.float32, "meta")


def test_a_plan_whose_cache_finds_no_room_is_not_chosen() -> None:
    """Two replicas fit while nothing is sampled; with a cache each must hold less of the model, or none fits."""
    spec, facts = small_spec(2), TrainingFacts(64, 4)
    sampled = replace(facts, sampling=SamplingFacts(64, 64, 2, 2, 64, 512))

    def check(plan: Plan, _: TrainingFacts) -> None:
        if plan.chunks > 1 or plan.cp > 1:
            raise PlanError("it cannot sample")

    def chosen(asked: TrainingFacts, memory: int) -> Plan:
        device = Device(memory, (("float32", ((1.0, 1e9), (256.0, 1e10))),), 1e10)
        cluster = Cluster(("a", "b"), (device,) * 2, (0, 1), (None,) * 2, default=LinkSpeed(1e-4, 1e10))
        limits = TrainingConstraints((1,), 0, check)
        return best_training(spec, cluster, asked, steps=200, constraints=limits).choices[0].placed.plan

    room = max(rank.total for rank in training_bytes(spec, Plan.parse("dp=2", 2), facts)) + 2**20
    assert chosen(facts, room).dp == (1, 1)
    cache = training_bytes(spec, Plan.parse("pp=1", 2), sampled)[0].cache
    assert cache == 64 * 512 * 2 * 4 * 2 * 4 * 32, "keys and values of four heads of 32 numbers in two layers"
    cut = chosen(sampled, room)
    assert cut.replica_size == 2, "each rank has half of the cache"
    assert all(rank.total <= room for rank in training_bytes(spec, cut, sampled))
    with pytest.raises(CapacityError, match="no plan that was looked at fits"):
        chosen(sampled, room - cache)


def test_rejection_learns_only_the_rows_that_it_keeps() -> None:
    table = RejectionConfig(REWARDS, num_generations=8, max_completion_length=20, keep=2)
    facts = training_facts(job_of(task="rejection", grpo=None, rejection=table, global_batch_size=32))
    assert facts.global_batch_size == 8 and facts.sampling is not None
    assert (facts.sampling.groups, facts.sampling.num_generations, facts.sampling.prompt) == (4, 8, 30)


def test_evaluations_that_sample_take_room_and_no_seconds_of_steps() -> None:
    job = job_of(task="sft", grpo=None, eval_files=("b",), eval_num_prompts=40, eval_max_new_tokens=10)
    sampling = training_facts(job).sampling
    assert with_role_plans(job, training_facts(job), small_spec(4)).sampling == sampling
    assert sampling is not None and (sampling.at_once, sampling.share) == (32, 0.0)
    assert training_facts(job_of(task="sft", grpo=None)).sampling is None
