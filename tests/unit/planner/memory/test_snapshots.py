"""The account of copies against the dealing of a real run's boxes, and what a copy costs where the wire is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from tests.unit.planner.measured.test_survey import SPEC, survey_of, training_node
from tllm.planner.cost.rank_work import RankWork, TrainingFacts, rank_works
from tllm.planner.measured.survey import cluster_of
from tllm.planner.memory.snapshots import rank_snapshots, save_bytes
from tllm.planner.memory.training_memory import rank_totals, training_bytes
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec, MoeSpec
from tllm.spec.plan import Plan
from tllm.spec.process_groups import snapshot_holders
from tllm.training.checkpoint.shard_assignment import HeldBox, assign_shards
from tllm.training.snapshot.placement import place_copies

FACTS = TrainingFacts(32, 8, 2, mirror_steps=1)
KINDS = "", "exp_avg/", "exp_avg_sq/"


def boxes(work: RankWork, plan: Plan, spec: ModelSpec) -> list[HeldBox]:
    """A rank's weights and two states as runs of float32, of experts that replicas divide apart; what zero spreads is a
    part of them for each replica."""
    experts, replica = work.at.replica % plan.ep, work.at.replica
    found = list[HeldBox]()
    for what, n, r in (
        ("all", work.replicas, replica),
        (f"experts {experts}", work.expert_replicas, replica // plan.ep),
    ):
        parameters = [one for unit in work.parameters(spec) for one in unit]
        elements = sum(one.elements for one in parameters if one.spread == (what != "all"))
        mine, everything = (elements * r // n, elements * (r + 1) // n), (0, elements)
        spread = {0: (everything, everything), 1: (everything, mine), 3: (mine, mine)}[plan.zero if n > 1 else 0]
        held = [("weight", spread[0]), ("exp_avg", spread[1]), ("exp_avg_sq", spread[1])]
        name = f"stage {work.at.stage} rank {work.at.tp} {what}"
        found += [HeldBox(f"{name} {kind}", (box,), "float32", 4) for kind, box in held if elements]
    return found


DENSE = "pp=1", "pp=2", "pp=3,layers=2+1+1", "tp=2", "dp=2", "dp=3", "dp=2,zero=1", "dp=2,zero=3", "dp=2,pp=2"
EXPERTS = replace(SPEC, layers=(replace(SPEC.layers[0], moe=MoeSpec(8, 2, 512)),) * SPEC.num_layers)
OF_EXPERTS = "dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=4", "dp=2,ep=2,zero=1", "dp=4,ep=2,zero=1", "dp=4,ep=2,zero=3"


MACHINES: dict[str, Callable[[int, int], int]] = {
    "each its own": lambda rank, ranks: rank,
    "one": lambda rank, ranks: 0,
    "halves": lambda rank, ranks: 2 * rank // ranks,
    "in turn": lambda rank, ranks: rank % 2,
    "all but the last": lambda rank, ranks: int(rank == ranks - 1),
}
"""Which machine a rank of so many is on."""


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize(
    ("text", "spec"), [*((text, SPEC) for text in DENSE), *((text, EXPERTS) for text in OF_EXPERTS)]
)
def test_copies_are_what_is_dealt(text: str, spec: ModelSpec, machines: str) -> None:
    plan = Plan.parse(text, spec.num_layers)
    works = rank_works(spec, plan, FACTS)
    held = [boxes(work, plan, spec) for work in works]
    hosts = tuple(str(MACHINES[machines](rank, len(works))) for rank in range(len(works)))
    dealt = place_copies(held, hosts)
    sizes = [[4 * (one.box[0][1] - one.box[0][0]) for one in copied] for copied in dealt]
    sent = [
        sum(size for size, one in zip(some, copied, strict=True) if one.sent)
        for some, copied in zip(sizes, dealt, strict=True)
    ]
    want = [2 * sum(some) for some in sizes]
    for rank, holder in enumerate(snapshot_holders(hosts)):
        want[holder] += 2 * sent[rank]
    found = rank_snapshots(spec, plan, FACTS, hosts)
    kept = [one.kept for one in found]
    assert sum(kept) == pytest.approx(sum(want), rel=1e-3)
    assert sum(one.sent for one in found) == pytest.approx(sum(sent), rel=1e-3)
    if plan.replicas == 1 or machines in ("each its own", "one", "halves"):
        assert [one.sent for one in found] == pytest.approx(sent, rel=1e-3)
    if plan.replicas == 1 or (plan.zero and plan.ep == 1):
        assert kept == pytest.approx(want, rel=0.35), "rank by rank, about"


@pytest.mark.parametrize("text", OF_EXPERTS)
def test_a_save_copies_experts_that_no_other_replica_has(text: str) -> None:
    """Each replica's were taken to be shared out among all."""
    plan = Plan.parse(text, EXPERTS.num_layers)
    works = rank_works(EXPERTS, plan, FACTS)
    dealt = assign_shards([boxes(work, plan, EXPERTS) for work in works])
    whole = sum(4 * (share.box[0][1] - share.box[0][0]) for some in dealt for share in some)
    assert 0.999 * whole < sum(save_bytes(EXPERTS, plan, FACTS, works)) < 1.05 * whole


def tensors(spec: ModelSpec, work: RankWork) -> list[HeldBox]:
    """A rank's weights, each with two states, by their names in a save; a tied table is the embedding."""
    names = ["model.embed_tokens.weight"] * (work.runs[0].start == 0)
    names += [f"model.layers.{number}" for run in work.runs for number in run]
    names += ["model.norm.weight"] * (work.runs[-1].stop == spec.num_layers)
    held = []
    for name, unit in zip(names, work.parameters(spec), strict=True):
        for number, one in enumerate(unit):
            table = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
            of = table if (name, number) == ("model.norm.weight", 1) else name
            of += f".{number}" if of.startswith("model.layers") else ""
            held += [HeldBox(f"{state}{of}", ((0, one.elements),), "float32", 4) for state in KINDS]
    return held


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "text", ["pp=1", "pp=2", "pp=2,layers=1+3", "pp=3,layers=2+1+1", "dp=2", "dp=3", "dp=3,pp=3,layers=1+2+1"]
)
def test_a_save_copies_what_is_dealt(text: str, tied: bool) -> None:
    spec, plan = replace(SPEC, tied=tied), Plan.parse(text, SPEC.num_layers)
    works = rank_works(spec, plan, FACTS)
    held = [tensors(spec, work) for work in works]
    dealt = [sum(4 * (share.box[0][1] - share.box[0][0]) for share in some) for some in assign_shards(held)]
    found = save_bytes(spec, plan, FACTS, works)
    if plan.replicas == 1:
        assert found == dealt
    else:  # the one with the most stands for all of a stage; of a tied table all its holders write, not one stage's
        stages = [[size for work, size in zip(works, dealt, strict=True) if work.at.stage == n] for n in range(plan.pp)]
        assert all(one >= max(stages[work.at.stage]) for one, work in zip(found, works, strict=True))
        assert max(found) == pytest.approx(max(dealt), rel=0.1 if tied and plan.pp > 1 else 0.02)


def test_a_copy_is_in_the_account_of_memory_and_of_time() -> None:
    cluster = cluster_of(survey_of("train", training_node("a"), training_node("b")), SPEC)
    plan = Plan.parse("pp=2", SPEC.num_layers)
    without = PlacedPlan(SPEC, plan, replace(FACTS, mirror_steps=0), cluster, (0, 1))
    with_copies = replace(without, facts=FACTS)
    more = [one.total - other.total for one, other in zip(with_copies.memory(), without.memory(), strict=True)]
    assert more == [one.kept for one in rank_snapshots(SPEC, plan, FACTS)] and min(more) > 0
    assert all(one.copies == 0 for one in training_bytes(SPEC, plan, without.facts))
    slow = replace(cluster, pairs=tuple((ends, replace(link, bandwidth=1e5)) for ends, link in cluster.pairs))
    late = [replace(one, cluster=slow).predict().seconds for one in (without, with_copies)]
    seldom = replace(with_copies, cluster=slow, facts=replace(FACTS, mirror_steps=10)).predict().seconds
    assert late[1] > late[0] and late[0] < seldom < late[1]
    assert seldom - late[0] == pytest.approx((late[1] - late[0]) / 10)


def test_the_only_rank_of_a_machine_keeps_the_snapshots_of_all_others() -> None:
    """Memory and seconds count it, and no other replica stands for one that is elsewhere."""
    alone = cluster_of(survey_of("train", *map(training_node, "abcd")), SPEC)
    alone = replace(alone, pairs=tuple((ends, replace(link, bandwidth=1e4)) for ends, link in alone.pairs))
    shared = replace(alone, hosts=("m", "m", "m", "n"))
    plan = Plan.parse("dp=4,zero=3", SPEC.num_layers)
    one, other = (PlacedPlan(SPEC, plan, FACTS, cluster, (0, 1, 2, 3)) for cluster in (alone, shared))
    assert (one.stands_for, other.stands_for) == ([0, 0, 0, 0], [0, 1, 1, 3])
    found = rank_snapshots(SPEC, plan, FACTS, ("m", "m", "m", "n"))
    assert [snapshots.received // found[0].sent for snapshots in found] == [1, 0, 0, 3]
    assert [rank.copies for rank in other.memory()] == [snapshots.kept for snapshots in found]
    assert list(rank_totals(SPEC, plan, FACTS, other.hosts)) == [rank.total for rank in other.memory()]
    assert other.predict().seconds == pytest.approx(3 * found[0].sent / 1e4, rel=1e-3), "a step hides no more of them"
    assert one.predict().seconds < 0.9 * other.predict().seconds


def test_surveys_tell_who_shares_a_machine() -> None:
    nodes = [msgspec.structs.replace(training_node(name), host_name="mn"[name == "c"]) for name in "abc"]
    assert cluster_of(survey_of("train", *nodes), SPEC).machines((2, 0, 1)) == ("n", "m", "m")
