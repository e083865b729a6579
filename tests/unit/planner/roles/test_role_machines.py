"""Who teaches, samples and trains: the choice against all subsets tried one by one, its seconds against slow loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cost.rank_work import JudgeFacts, TrainingFacts, rank_works
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.memory.role_memory import judge_bytes, judge_parts, rollout_bytes
from tllm.planner.roles.role_divisions import divisions
from tllm.planner.roles.role_machines import RoleChoice, RolesAsked, RoleWish, role_choices
from tllm.planner.roles.role_room import judge_room
from tllm.planner.roles.teacher_machines import Taught, teaching_seconds
from tllm.planner.search.training_layouts import TrainingConstraints
from tllm.planner.search.training_search import TrainingChoice, best_training
from tllm.planner.simulate.role_seconds import Learning, group_seconds, role_seconds, row_seconds
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName

STUDENT = spec_of(2)
FACTS = TrainingFacts(64, 8, 2)
TEACHER = JudgeFacts(spec_of(6), "float32", 8 * 64, 64)
TAUGHT = Taught(TEACHER, 64 * 64 * 6)


def cluster(*speeds: float, bandwidth: float = 1e8, memory: int = 2**32) -> Cluster:
    devices = tuple(
        Device(memory, (("float32", ((1.0, speed * 1e10), (256.0, speed * 1e10))),), speed * 1e10) for speed in speeds
    )
    count = len(speeds)
    names = tuple(f"n{i}" for i in range(count))
    return Cluster(names, devices, tuple(range(count)), (None,) * count, default=LinkSpeed(1e-4, bandwidth))


def refuse(plan: Plan, facts: TrainingFacts) -> None:
    """As `check_combination` does: a completion's ring passes each stage once."""
    if facts.sampling is not None and (plan.cp > 1 or plan.chunks > 1):
        raise PlanError(f"{plan} samples nothing")


def best(part: Cluster, facts: TrainingFacts) -> TrainingChoice:
    limits = TrainingConstraints((2,), 0, refuse)
    return best_training(STUDENT, part, facts, steps=100, constraints=limits).choices[0]


def taught_choices(machines: Cluster, taught: Taught, named: tuple[int, ...] | None = None) -> list[RoleChoice]:
    facts = replace(FACTS, teacher=taught.teacher)
    return role_choices(machines, RolesAsked(STUDENT, facts, {"teacher": RoleWish(named)}, taught), best)


def chosen(machines: Cluster, taught: Taught = TAUGHT) -> RoleChoice:
    return taught_choices(machines, taught)[0]


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 1.0, 6.0), (4.0, 1.0, 0.5)])
def test_no_other_choice_of_teachers_is_faster(speeds: tuple[float, ...]) -> None:
    machines, found = cluster(*speeds), list[float]()
    for count in range(3):
        for teachers in combinations((1, 2), count):
            one = taught_choices(machines, TAUGHT, teachers)[0]
            assert set(one.policy).isdisjoint(teachers) and one.policy[0] == 0
            found.append(one.seconds)
    assert chosen(machines).seconds == pytest.approx(min(found))


def test_the_fast_machine_teaches_where_the_teacher_is_the_larger() -> None:
    one = chosen(cluster(1.0, 1.0, 6.0))
    assert one.teachers == (2,), "three times as deep as the student"
    assert one.seconds == pytest.approx(max(one.training.predicted.seconds, one.teaching))
    beside = taught_choices(cluster(1.0), TAUGHT)[0]
    assert beside.teachers == () and beside.teaching == dict(beside.training.predicted.roles)["teacher"]
    assert one.seconds < beside.seconds / 2


def test_rows_go_to_whichever_teacher_is_free() -> None:
    machines = cluster(1.0, 1.0, 3.0, bandwidth=1e12)
    slow, fast = (row_seconds(TEACHER, machines, device) for device in (1, 2))
    free = {1: 0.0, 2: 0.0}
    for _ in range(8):
        device = min(free, key=lambda one: free[one] + (slow if one == 1 else fast))
        free[device] += slow if device == 1 else fast
    assert teaching_seconds(machines, TAUGHT, (1, 2)) == pytest.approx(max(free.values()))
    assert teaching_seconds(machines, TAUGHT, (1,)) == pytest.approx(8 * slow)
    thin = cluster(1.0, 1.0, 3.0, bandwidth=1e3)
    assert teaching_seconds(thin, TAUGHT, (2,)) == pytest.approx(8 * TAUGHT.answer_bytes / 1e3), "the link is slower"


def test_what_the_student_writes_is_judged_after_it_is_there() -> None:
    machines = cluster(1.0, 2.0)
    (data,) = taught_choices(machines, TAUGHT, (1,))
    (own,) = taught_choices(machines, replace(TAUGHT, lmbda=1.0), (1,))
    (half,) = taught_choices(machines, replace(TAUGHT, lmbda=0.5), (1,))
    assert own.seconds == pytest.approx(own.training.predicted.policy + own.teaching)
    assert data.seconds == pytest.approx(max(own.training.predicted.policy, own.teaching))
    assert half.seconds == pytest.approx((own.seconds + data.seconds) / 2)


def test_a_machine_that_lacks_room_for_the_teacher_does_not_teach() -> None:
    machines = cluster(1.0, 1.0, 6.0)
    small = replace(machines.devices[2], memory=300 * 2**20 + judge_bytes(TEACHER) // 2)
    tight = replace(machines, devices=(*machines.devices[:2], small))
    assert all(2 not in one.teachers for one in taught_choices(tight, TAUGHT))
    with pytest.raises(CapacityError, match="n2 is to teach: its model needs"):
        taught_choices(tight, TAUGHT, (2,))
    unknown = Taught(replace(TEACHER, dtype="bfloat16"), 1.0)
    assert [one.teachers for one in taught_choices(machines, unknown)] == [()], "its speed is known nowhere"
    with pytest.raises(CapacityError, match="no choice of machines for the roles has room"):
        taught_choices(cluster(1.0, 1.0, memory=2**20), TAUGHT)


SAMPLING = SamplingFacts(prompt=16, completion=48, groups=6, num_generations=4, at_once=8, context=64)
SAMPLED = replace(FACTS, sampling=SAMPLING)


def rollout_choices(machines: Cluster, wish: RoleWish, sampling: SamplingFacts = SAMPLING) -> list[RoleChoice]:
    return role_choices(machines, RolesAsked(STUDENT, replace(FACTS, sampling=sampling), {"rollout": wish}), best)


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (0.5, 1.0, 6.0), (4.0, 1.0, 0.5)])
def test_no_other_choice_of_rollout_servers_is_faster(speeds: tuple[float, ...]) -> None:
    machines, found = cluster(*speeds), dict[tuple[int, ...], float]()
    for count in range(3):
        for servers in combinations((1, 2), count):
            (one,) = rollout_choices(machines, RoleWish(servers))
            assert one.rollouts == servers and set(one.policy).isdisjoint(servers) and one.policy[0] == 0
            assert one.seconds == one.training.predicted.seconds
            found[servers] = one.seconds
    every = rollout_choices(machines, RoleWish())
    assert every[0].seconds == pytest.approx(min(found.values()))
    assert len(every) == (3 if speeds[1] == speeds[2] else 4), "sets that are alike are tried once"
    just_one = rollout_choices(machines, RoleWish(count=1))
    assert {one.rollouts for one in just_one} <= {(1,), (2,)}
    assert just_one[0].seconds == pytest.approx(min(found[(1,)], found[(2,)]))


SCORER = JudgeFacts(replace(spec_of(6), num_labels=1), "float32", 24 * 64, 64)


def reward_choices(machines: Cluster, wishes: dict[RoleName, RoleWish]) -> list[RoleChoice]:
    return role_choices(machines, RolesAsked(STUDENT, replace(SAMPLED, reward=SCORER), wishes), best)


@pytest.mark.slow
def test_no_other_choice_of_machines_that_sample_and_score_is_faster() -> None:
    """All ranks wait for the completions and then for their scores, wherever these are computed."""
    machines, found = cluster(1.0, 2.0, 6.0), list[float]()
    for rollouts, rewards in (((), ()), ((1,), ()), ((), (1,)), ((2,), ()), ((), (2,)), ((2,), (1,)), ((1,), (2,))):
        (one,) = reward_choices(machines, {"rollout": RoleWish(rollouts), "reward": RoleWish(rewards)})
        assert (one.rollouts, one.rewards) == (rollouts, rewards)
        assert set(one.policy).isdisjoint((*rollouts, *rewards)) and one.policy[0] == 0
        roles = dict(one.training.predicted.roles)
        assert roles["rewards"] == pytest.approx(24 * row_seconds(SCORER, machines, *(rewards or (0,))))
        assert one.seconds == pytest.approx(one.training.predicted.policy + roles["sampling"] + roles["rewards"])
        assert bool(one.training.memory[0].reward) == (not rewards), "rank 0 holds it where nobody else does"
        found.append(one.seconds)
    every = reward_choices(machines, {"rollout": RoleWish(), "reward": RoleWish()})
    both = [one.seconds for one in every if len(one.rollouts) < 2 and len(one.rewards) < 2]
    assert sorted(both) == pytest.approx(sorted(found)) and every[0].seconds <= min(found)
    named = reward_choices(machines, {"rollout": RoleWish((1,)), "reward": RoleWish()})
    assert [one.seconds for one in named] == pytest.approx(sorted((found[1], found[6])))
    with pytest.raises(CapacityError, match="no choice"):
        reward_choices(machines, {"rollout": RoleWish((1,)), "reward": RoleWish((1,))})


def test_two_machines_hold_a_teacher_together_that_neither_has_room_for() -> None:
    """A row goes through both, one after the other; the next row is another pair's, if there is one."""
    plan = Plan.parse("pp=2", 6)
    halves = replace(TEACHER, plan=plan)
    assert 0.5 * judge_bytes(TEACHER) < judge_bytes(halves) < 0.6 * judge_bytes(TEACHER)
    machines = cluster(*(1.0,) * 5)
    tight = replace(machines.devices[1], memory=TRAINER_BYTES + int(0.7 * judge_bytes(TEACHER)))
    machines = replace(machines, devices=(machines.devices[0], *(tight,) * 4))
    with pytest.raises(CapacityError, match="n1 is to teach"):
        taught_choices(machines, TAUGHT, (1, 2))
    taught = Taught(halves, 1.0)
    (pair,), (quad,) = (taught_choices(machines, taught, named) for named in ((1, 2), (1, 2, 3, 4)))
    row = row_seconds(halves, machines, 1, 2)
    hop = 64 * TEACHER.spec.hidden_size * 4 / 1e8 + 1e-4
    assert row == pytest.approx(row_seconds(TEACHER, machines, 1) + hop, rel=0.05)
    assert pair.teaching == pytest.approx(8 * row) and quad.teaching == pytest.approx(4 * row)
    three = cluster(*(1.0,) * 4)
    three = replace(three, devices=machines.devices[:4])
    assert {one.teachers for one in taught_choices(three, taught)} == {(), (2, 3)}, "one alone is nothing"
    uneven = Taught(replace(TEACHER, plan=Plan.parse("pp=2,layers=5+1", 6)), 1.0)
    small = replace(tight, memory=TRAINER_BYTES + int(0.4 * judge_bytes(TEACHER)))
    large = replace(tight, memory=TRAINER_BYTES + judge_bytes(TEACHER))
    unlike = replace(machines, devices=(machines.devices[0], small, large, small, large))
    assert taught_choices(unlike, uneven, (2, 1, 4, 3))[0].teachers == (2, 1, 4, 3), "each has room for its own part"
    with pytest.raises(CapacityError, match="n1 is to teach"):
        taught_choices(unlike, uneven, (1, 2, 3, 4))


def test_the_plan_by_which_machines_hold_a_teacher_is_chosen_too() -> None:
    """Where one machine has no room for it, or where several are faster together."""
    machines, given = cluster(*(1.0,) * 5), dict[tuple[str, int], float]()
    texts = {Plan.parse(text, 6): text for text in ("pp=2", "pp=3", "pp=4", "tp=2", "tp=3", "tp=4", "pp=2,tp=2")}
    for text in ("pp=1", *texts.values()):
        size = Plan.parse(text, 6).world_size
        taught = replace(TAUGHT, teacher=replace(TEACHER, plan=Plan.parse(text, 6) if size > 1 else None))
        for one in role_choices(machines, asked_of(taught, RoleWish()), best):
            assert one.plans == ({"teacher": Plan.parse(text, 6)} if one.teachers and size > 1 else {})
            given[text if one.teachers else "", len(one.teachers)] = one.seconds
    every = role_choices(machines, asked_of(TAUGHT, RoleWish(divides=True)), best)
    found = {
        (texts[one.plans["teacher"]] if one.plans else "pp=1" if one.teachers else "", len(one.teachers)): one.seconds
        for one in every
    }
    assert found == pytest.approx(given)
    tight = replace(machines.devices[1], memory=TRAINER_BYTES + int(0.7 * judge_bytes(TEACHER)))
    small = replace(machines, devices=(machines.devices[0], *(tight,) * 4))
    chosen = role_choices(small, asked_of(TAUGHT, RoleWish(count=2, divides=True)), best)
    assert {texts[one.plans["teacher"]] for one in chosen} == {"pp=2", "tp=2"}
    named = role_choices(small, asked_of(TAUGHT, RoleWish((2, 1, 4, 3), divides=True)), best)
    assert {one.teachers for one in named} == {(2, 1, 4, 3)}
    assert {texts[one.plans["teacher"]] for one in named} == {"pp=2", "tp=2", "pp=4", "tp=4", "pp=2,tp=2"}
    with pytest.raises(CapacityError, match="n2 is to teach"):
        role_choices(small, asked_of(TAUGHT, RoleWish((2,), divides=True)), best)
    large = replace(small.devices[0], memory=TRAINER_BYTES + judge_bytes(TEACHER))
    half = replace(large, memory=TRAINER_BYTES + judge_bytes(TEACHER) // 2)
    unlike = replace(small, devices=(small.devices[0], half, large))
    unlike = replace(unlike, names=unlike.names[:3], node_of=unlike.node_of[:3], inside=unlike.inside[:3])
    uneven = replace(TAUGHT, teacher=replace(TEACHER, plan=Plan.parse("pp=2,layers=5+1", 6)))
    assert {one.teachers for one in role_choices(unlike, asked_of(uneven, RoleWish()), best)} == {(), (2, 1)}
    tiny = replace(half, memory=TRAINER_BYTES + judge_bytes(TEACHER) // 9)
    without = replace(unlike, devices=(small.devices[0], tiny, large))
    assert not [one for one in role_choices(without, asked_of(uneven, RoleWish()), best) if one.teachers], "n1 is small"
    four = replace(machines, devices=(small.devices[0], half, half, large, large))
    every = role_choices(four, asked_of(uneven, RoleWish(count=4)), best)
    assert {one.teachers for one in every} == {(3, 1, 4, 2)}, "each model has one of the large machines"
    even = replace(unlike, devices=(unlike.devices[0], large, replace(large, memory=2 * large.memory)))
    assert {one.teachers for one in role_choices(even, asked_of(uneven, RoleWish()), best)} == {(), (2, 1)}


def test_stages_of_unlike_machines_are_chosen_as_they_have_room() -> None:
    """Where even stages find none, where one machine is the faster, and in the order of the machines that are named."""
    machines = cluster(1.0, 1.0, 1.0)
    rooms = [TRAINER_BYTES + int(part * judge_bytes(TEACHER)) for part in (0.4, 0.9)]
    small, large = (replace(machines.devices[1], memory=room) for room in rooms)
    unlike = replace(machines, devices=(machines.devices[0], small, large))
    apart = [one for one in role_choices(unlike, asked_of(TAUGHT, RoleWish(divides=True)), best) if one.teachers]
    assert {one.teachers for one in apart} == {(2, 1)}, "the first part is the larger, and the other machine's"
    plans = {one.plans["teacher"] for one in apart}
    assert {plan.pp for plan in plans} == {1, 2}, "stages, and shares of each layer"
    for plan in plans:
        first, second = parts_of(plan)
        assert first > second
    every = role_choices(unlike, asked_of(TAUGHT, RoleWish((1, 2), divides=True)), best)
    assert {one.plans["teacher"].pp for one in every} == {1, 2}
    for named in every:
        first, second = parts_of(named.plans["teacher"])
        assert named.teachers == (1, 2) and first < second
    fast = cluster(1.0, 1.0, 3.0)
    tight = [replace(one, memory=TRAINER_BYTES + int(0.9 * judge_bytes(TEACHER))) for one in fast.devices[1:]]
    fast = replace(fast, devices=(fast.devices[0], *tight))
    every = role_choices(fast, asked_of(TAUGHT, RoleWish(count=2, divides=True)), best)
    by_pipeline = [one for one in every if one.plans["teacher"].pp == 2]
    even = next(one for one in by_pipeline if one.plans["teacher"] == Plan.parse("pp=2", 6))
    quickest = min(by_pipeline, key=lambda one: one.teaching)
    first, second = quickest.plans["teacher"].stages
    assert quickest.teachers == (2, 1) and first.stop - first.start > second.stop - second.start
    assert quickest.teaching < 0.9 * even.teaching
    assert (first.stop, second.stop - second.start) == (5, 1), "as much as has room on the faster one"
    shares = {one.plans["teacher"].stages[0].shares for one in every if one.plans["teacher"].pp == 1}
    assert shares == {(1, 1), (16, 5)}, "in about the proportion of their speeds"


def parts_of(plan: Plan) -> tuple[int, int]:
    """Of two machines: the layers of each, or its share of every layer."""
    if plan.pp == 1:
        return plan.stages[0].shares[0], plan.stages[0].shares[1]
    first, second = plan.stages
    return first.stop - first.start, second.stop - second.start


def test_the_fastest_has_the_most_layers_although_another_has_more_memory() -> None:
    """Unless it lacks room for them."""
    machines = cluster(1.0, 1.0, 3.0)
    rooms = [TRAINER_BYTES + int(part * judge_bytes(TEACHER)) for part in (1.0, 0.9)]
    most = [replace(one, memory=room) for one, room in zip(machines.devices[1:], rooms, strict=True)]
    machines = replace(machines, devices=(machines.devices[0], *most))
    every = role_choices(machines, asked_of(TAUGHT, RoleWish(count=2, divides=True)), best)
    quickest = min((one for one in every if one.plans["teacher"].pp == 2), key=lambda one: one.teaching)
    layers = dict(zip(quickest.teachers, parts_of(quickest.plans["teacher"]), strict=True))
    assert layers == {1: 1, 2: 5}


def test_of_many_machines_those_of_middle_speed_with_room_are_found() -> None:
    """The fastest and the slowest of those with room for the smaller part lack it for the larger."""
    machines = cluster(1.0, *(2.0 + number for number in range(10)))
    halves = replace(TEACHER, plan=Plan.parse("pp=2,layers=5+1", 6))
    parts = judge_parts(halves)
    small, large = (replace(machines.devices[0], memory=TRAINER_BYTES + part) for part in (min(parts), max(parts)))
    devices = [
        replace(one, memory=(large if 4 <= at <= 7 else small).memory) for at, one in enumerate(machines.devices)
    ]
    machines = replace(machines, devices=(machines.devices[0], *devices[1:]))

    def alone(part: Cluster, facts: TrainingFacts) -> TrainingChoice:
        return best(replace(part, devices=part.devices[:1], node_of=part.node_of[:1]), facts)

    every = role_choices(machines, asked_of(Taught(halves, 1.0), RoleWish(count=2)), alone)
    assert {frozenset(one.teachers) for one in every} == {frozenset((4, 5)), frozenset((6, 7))}


def test_no_plan_for_a_role_comes_twice() -> None:
    """The even stages are also those that unlike machines may have."""
    machines = cluster(1.0, 1.0, 1.0)
    larger = replace(machines.devices[2], memory=2 * machines.devices[2].memory)
    for devices in ((*machines.devices[:2], larger), cluster(1.0, 1.0, 1.1).devices):
        room = judge_room(replace(machines, devices=devices), "teach", TEACHER)
        by_layer = judge_parts(replace(TEACHER, plan=Plan.parse("pp=6", 6)))
        plans = list(divisions(room, by_layer, None, 2))
        assert len(plans) == len(set(plans)) >= 2 and Plan.parse("pp=2", 6) in plans


def asked_of(taught: Taught, wish: RoleWish) -> RolesAsked:
    return RolesAsked(STUDENT, replace(FACTS, teacher=taught.teacher), {"teacher": wish}, taught)


def test_a_machine_without_room_for_the_reward_model_does_not_score() -> None:
    machines = cluster(1.0, 1.0, 6.0)
    small = replace(machines.devices[2], memory=TRAINER_BYTES + judge_bytes(SCORER) // 2)
    tight = replace(machines, devices=(*machines.devices[:2], small))
    assert {one.rewards for one in reward_choices(tight, {"reward": RoleWish()})} == {(), (1,)}
    with pytest.raises(CapacityError, match="n2 is to score: its model needs"):
        reward_choices(tight, {"reward": RoleWish((2,))})
    assert judge_bytes(SCORER) < judge_bytes(TEACHER), "it gives one number and no logits"


def test_servers_take_the_weights_over_one_port_and_then_what_is_free_takes_the_next_prompts() -> None:
    machines = cluster(1.0, 1.0, 3.0, bandwidth=1e7)
    facts = replace(SAMPLED, sampling=replace(SAMPLING, servers=(1, 2), share=0.5))
    free = {1: 0.0, 2: 0.0}
    for _ in range(3):  # six prompts: as many at once as a server computes, which are two
        device = min(free, key=lambda one: (free[one], one))
        free[device] += group_seconds(STUDENT, SAMPLED, machines, 2, device)
    numbers = sum(
        one.elements for unit in rank_works(STUDENT, Plan.parse("pp=1", 2), FACTS)[0].learned(STUDENT) for one in unit
    )
    way = 2 * numbers * 4 / 1e7
    found = role_seconds(STUDENT, Plan.parse("pp=1", 2), facts, machines, (0,), Learning(1.0, 1.0))
    assert found == {"sampling": pytest.approx(0.5 * (way + max(free.values())))}
    apart = cluster(1.0, 1.0, 3.0, 1.0, bandwidth=1e7)
    two = role_seconds(STUDENT, Plan.parse("pp=2", 2), facts, apart, (0, 3), Learning(1.0, 1.0))
    assert two["sampling"] - found["sampling"] == pytest.approx(0.5 * numbers * 4 / 2 / 1e7), (
        "half of them lie elsewhere"
    )
    ahead = replace(SAMPLED, sampling=replace(SAMPLING, servers=(1, 2), share=0.5, ahead=1))
    for part in (0.25, 4.0):
        learning = part * found["sampling"]
        waits = role_seconds(STUDENT, Plan.parse("pp=1", 2), ahead, machines, (0,), Learning(learning, 1.0))["sampling"]
        assert waits == pytest.approx(max(0.0, found["sampling"] - learning)), "a step takes as long as the slower one"
    gathers = role_seconds(STUDENT, Plan.parse("pp=2", 2), ahead, apart, (0, 3), Learning(1e9, 1.0))["sampling"]
    assert gathers == pytest.approx(0.5 * numbers * 4 / 2 / 1e7), "nobody learns meanwhile"


def test_two_machines_hold_a_policy_together_that_neither_has_room_for() -> None:
    machines, plan = cluster(*(1.0,) * 5, bandwidth=1e7), Plan.parse("pp=2", 2)
    halves = replace(SAMPLING, plan=plan)
    needs = rollout_bytes(STUDENT, SAMPLED)
    assert 0.5 * needs < rollout_bytes(STUDENT, replace(SAMPLED, sampling=halves)) < 0.8 * needs, "with the head"
    tight = replace(machines.devices[1], memory=TRAINER_BYTES + int(0.8 * needs))
    machines = replace(machines, devices=(machines.devices[0], *(tight,) * 4))
    with pytest.raises(CapacityError, match="n1 is to sample"):
        rollout_choices(machines, RoleWish((1, 2)))
    assert {len(one.rollouts) for one in rollout_choices(machines, RoleWish(), halves)} == {0, 2, 4}
    work, *_ = rank_works(STUDENT, Plan.parse("pp=1", 2), FACTS)
    way = sum(one.elements for unit in work.learned(STUDENT) for one in unit) * 4 / 1e7
    for servers in ((1, 2), (1, 2, 3, 4)):
        (one,) = rollout_choices(machines, RoleWish(servers), halves)
        teams = len(servers) // 2
        questions = -(-3 // teams)  # of two prompts each
        facts = replace(SAMPLED, sampling=replace(halves, servers=servers))
        samples = questions * group_seconds(STUDENT, facts, machines, 2, 1, 2)
        sampling = dict(one.training.predicted.roles)["sampling"]
        assert sampling == pytest.approx(teams * 1.5 * way + samples, rel=1e-6), "each first one sends a half on"


def test_a_machine_without_room_for_the_cache_does_not_sample() -> None:
    machines = cluster(1.0, 1.0, 6.0)
    small = replace(machines.devices[2], memory=300 * 2**20 + rollout_bytes(STUDENT, SAMPLED) // 2)
    tight = replace(machines, devices=(*machines.devices[:2], small))
    assert all(2 not in one.rollouts for one in rollout_choices(tight, RoleWish()))
    with pytest.raises(CapacityError, match="n2 is to sample: its model needs"):
        rollout_choices(tight, RoleWish((2,)))
    best_of = rollout_choices(machines, RoleWish())
    assert all(not one.training.memory[0].cache for one in best_of if one.rollouts), "the ranks keep no cache"
