"""Completions of all replicas on their way to rank 0: each travels once, however many ranks there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from tests.support.models.layouts import in_threads
from tests.support.training.post_training.policy_task import policy_job
from tllm.comm.collectives.group import local_groups
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder, SampledPart
from tllm.training.policy.sample_together import dealt, sample_together
from tllm.training.step.rank_groups import Groups, RankConfig

REPLICAS, TOKENS = 4, 500


class Long:
    """`Rollouts` of one replica, whose completions are long; or which fail."""

    def __init__(self, rank: int, fails: bool) -> None:
        self.metrics: dict[str, float] = {}
        self._rank, self._fails = rank, fails

    def share(self, order: RolloutOrder) -> Sequence[PromptGroup]:
        return order.groups[self._rank]

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        if self._fails:
            raise ConfigError("no memory", "ask for less")
        return [Completion((self._rank,) * TOKENS, (-0.5,) * TOKENS, True) for _ in groups]

    def close(self) -> None: ...


def sampled(fails: Sequence[int] = ()) -> tuple[list[Any], int]:
    """What each rank is told, and the bytes that all links have carried."""
    plan, groups = Plan.parse(f"dp={REPLICAS}", 2), local_groups(REPLICAS)
    order = dealt([PromptGroup((number,), (1,)) for number in range(REPLICAS)], (0,), plan)

    def one(rank: int) -> Any:
        job = policy_job(Path(), Path("run"))
        config = RankConfig(job, plan, cast(Any, None), rank, Groups(world=groups[rank]))
        asked = None if rank else order
        return sample_together(config, Long(rank, rank in fails), CompletionSampling(TOKENS), asked)

    told = in_threads([partial(one, rank) for rank in range(REPLICAS)])
    return told, sum(cast(Any, link).bytes_moved for group in groups for link in group.send.values())


def test_rank_0_alone_gets_the_completions_and_each_travels_once() -> None:
    told, nbytes = sampled()
    assert [completion.ids[0] for completion in told[0][1]] == list(range(REPLICAS)) and not any(
        completions for _, completions in told[1:]
    )
    part = len(msgspec.msgpack.encode(SampledPart((Completion((0,) * TOKENS, (-0.5,) * TOKENS, True),))))
    assert part > 9 * TOKENS
    assert (REPLICAS - 1) * part < nbytes < (REPLICAS - 1) * (part + 200), "to all ranks it would be four times as much"


def test_what_fails_on_one_replica_every_rank_is_told() -> None:
    told, _ = sampled(fails=(2,))
    assert all(order.fault == ("no memory", "ask for less") and not completions for order, completions in told)
