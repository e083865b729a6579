"""When steps are asked for, what is kept of them, and versions of weights that questions still need."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from tests.support.training.post_training.policy_task import grpo, policy_job
from tllm.comm.links.link import LocalLink
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder
from tllm.training.questions.waiting_ranks import Still
from tllm.training.rollout_servers import published_weights, weight_chunks
from tllm.training.rollout_servers.published_weights import PublishedWeights
from tllm.training.rollout_servers.remote_rollouts import RemoteRollouts
from tllm.training.rollout_servers.sampled_ahead import STALENESS, SampledAhead
from tllm.training.step.rank_groups import Groups, RankConfig


class Asked:
    """An answer that says with which weights it was sampled; or a fault."""

    is_over = True

    def __init__(self, group: PromptGroup, version: int, fails: bool) -> None:
        self.metrics: dict[str, float] = {}
        self._group, self._version, self._fails = group, version, fails

    def wait(self, still: Still) -> list[Completion]:
        still()
        if self._fails:
            raise ConfigError("no server answers", "start one")
        return [Completion((self._group.ids[0], self._version), (-1.0, -0.1), False) for _ in self._group.seeds]


class Recorded:
    """`RemoteRollouts` without servers: counts the versions of the weights, and fails for some steps."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.version, self.asked, self._fails = -1, list[tuple[int, int]](), fails

    def publish(self) -> None:
        self.version += 1

    def ask(self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling) -> Asked:
        (group,) = groups
        self.asked.append((group.ids[0], self.version))
        return Asked(group, self.version, group.ids[0] in self._fails)


def config_of(max_staleness: int, num_iterations: int = 1, rank: int = 0, groups: Groups | None = None) -> RankConfig:
    table = grpo(Path(), rollout_servers=("h:1",), max_staleness=max_staleness, num_iterations=num_iterations)
    job, plan = policy_job(Path(), Path("run"), table), Plan.parse("dp=2" if rank else "pp=1", 2)
    return RankConfig(job, plan, cast(Any, None), rank, groups or Groups())


def ahead(rollouts: Recorded, max_staleness: int, num_iterations: int = 1) -> SampledAhead:
    return SampledAhead(config_of(max_staleness, num_iterations), cast(RemoteRollouts, rollouts))


def order_of(step: int) -> RolloutOrder:
    return RolloutOrder(((PromptGroup((step,), (1, 2)),),), (0,))


def taken(one: SampledAhead, steps: range, stop: int = 6) -> list[tuple[int, float]]:
    """The weights that each step was sampled with, by their number, and the staleness that is told."""
    one.begin(steps.start, stop)
    found = []
    for step in steps:
        order, completions = one.of_step(step, order_of)
        assert order.fault is None and [completion.ids[0] for completion in completions] == [step, step]
        found.append((completions[0].ids[1], one.metrics[STALENESS]))
    return found


def test_weights_are_so_many_steps_old_and_are_published_while_steps_are_left_to_ask() -> None:
    rollouts = Recorded()
    assert taken(ahead(rollouts, 2), range(6)) == [(0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (3, 2)]
    assert rollouts.asked == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)] and rollouts.version == 3
    # With two steps on each sampling the second has no weights of its own.
    assert taken(ahead(Recorded(), 2, num_iterations=2), range(0, 6, 2)) == [(0, 0), (0, 2), (1, 2)]


def test_ranks_go_on_when_rank_0_has_the_completions_however_long_it_says_that_it_waits() -> None:
    """Of a step that is sampled now, of one that was sampled ahead, and of those that a snapshot keeps."""
    order, link = RolloutOrder((), (0,)), LocalLink(0, 1)
    config = config_of(2, rank=1, groups=Groups(data={0: link}))
    for said in (b"", b"", b"on", b"", msgspec.msgpack.encode(order), b"", b"on"):
        link.send_bytes(said)
    other = RemoteRollouts(config, cast(Any, None), None)
    assert other.sample([], (0,), CompletionSampling(4)) == []
    sampled = SampledAhead(config, other)
    assert sampled.of_step(0, None) == (order, [])
    link.send_bytes(b"next")
    assert sampled.position(b"", 1) == b"" and link.recv_bytes(4) == b"next"


def test_what_was_sampled_ahead_is_kept_and_taken_up_where_it_is_not_too_old() -> None:
    first = ahead(Recorded(), 2)
    taken(first, range(2))
    kept = msgspec.json.decode(msgspec.json.encode(first.state(2)))["ahead"]
    snapshot = msgspec.msgpack.decode(first.position(msgspec.msgpack.encode({"prompts": 7}), 2))
    assert snapshot == {"prompts": 7, "ahead": kept} and [one["step"] for one in kept] == [2, 3]
    for staleness, want in ((2, [(0, 2), (1, 2), (0, 2), (1, 2)]), (1, [(0, 0), (0, 1), (1, 1), (2, 1)])):
        again = ahead(rollouts := Recorded(), staleness)
        again.restore(kept)
        assert again.state(2)["ahead"] == (kept if staleness == 2 else []), "what is not taken up yet is kept again"
        assert taken(again, range(2, 6)) == want
        assert [step for step, _ in rollouts.asked] == ([4, 5] if staleness == 2 else [2, 3, 4, 5])


def test_a_step_that_cannot_be_sampled_fails_in_its_turn_and_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    one = ahead(Recorded(fails=(1,)), 2)
    taken(one, range(1))
    with caplog.at_level(logging.WARNING, "tllm.train"):
        assert [kept["step"] for kept in one.state(1)["ahead"]] == [2]
    assert "what is kept of step 1 lacks completions of step 2" in caplog.text
    order, completions = one.of_step(1, order_of)
    assert order.fault == ("no server answers", "start one") and not completions


def test_completions_of_another_number_end_the_run_with_the_reason() -> None:
    one = ahead(Recorded(), 1)
    taken(one, range(1))
    again = ahead(Recorded(), 1)
    again.restore(one.state(1)["ahead"])
    again.begin(1, 6)
    order, _ = again.of_step(1, lambda step: RolloutOrder(((PromptGroup((step,), (1, 2, 3)),),), (0,)))
    assert (
        order.fault is not None
        and order.fault[0] == "the save's completions of step 2 are of other prompts than the job asks for now"
    )


def test_room_is_used_again_when_nobody_needs_what_it_held() -> None:
    made: list[dict[str, torch.Tensor]] = []

    def room() -> dict[str, torch.Tensor]:
        made.append({"w": torch.zeros(4)})
        return made[-1]

    weights = PublishedWeights(room)
    first = weights.publish(weights.unused())
    weights.use(first)
    second = weights.unused()
    second.tensors["w"].fill_(1)
    second = weights.publish(second)
    assert second is not first and weights.changed_bytes == 16 and len(made) == 2
    same = weights.unused()
    same.tensors["w"].fill_(1)
    assert weights.publish(same) is second and second.users == 2, "weights that did not move are one version"
    assert weights.changed_bytes == 0
    weights.release(first)
    assert float(first.tensors["w"].sum()) == 0 and weights.unused() is same
    weights.release(first)
    assert weights.unused() is first and len(made) == 3


def test_a_message_has_as_many_chunks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_chunks, "CHUNK_BYTES", 4)
    monkeypatch.setattr(published_weights, "MESSAGE_BYTES", 8)
    weights = PublishedWeights(lambda: {"w": torch.zeros(7)})
    assert [*weights._messages([0, 1, 2, 4, 6])] == [[0, 1], [2, 4], [6]]
