"""What is measured chooses the way and never the bits; and the line that says so."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.comm.even_network import even_network
from tests.support.comm.ranks import run_ranks
from tests.support.selection import soak_but
from tllm.comm.collectives import tuning as measuring
from tllm.comm.collectives import tuning as tuning
from tllm.comm.collectives.algorithm_choice import MeasuredChoice
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.collectives.network_model import NetworkModel
from tllm.comm.collectives.tuning import tune_between_hosts

SLOW = even_network(3, latency=5e-3, rate=12.5e6, message=2e-5)


def some_network(size: int, seed: int) -> NetworkModel:
    """Any numbers that a measurement might give, over four powers of ten, and any machines."""
    drawn = random.Random(seed)

    def matrix(low: float, high: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(0.0 if a == b else 10 ** drawn.uniform(low, high) for b in range(size)) for a in range(size))

    hosts = sorted(drawn.choices(range(size), k=size))
    numbered = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return NetworkModel(
        matrix(-5, -1), matrix(6, 10), tuple(numbered[host] for host in hosts), 10 ** drawn.uniform(-6, -4)
    )


@pytest.mark.parametrize("size", soak_but([2, 3, 5], [2, 3, 4, 5]))
def test_whatever_is_measured_all_collectives_keep_their_bits(size: int) -> None:
    lengths, dtypes = (1, 600, 40_000), (torch.float32, torch.bfloat16, torch.float64)
    taken = set()

    def work(group: Group) -> list[torch.Tensor]:
        found = []
        for length in lengths:
            for dtype in dtypes:
                x = torch.randn(length, generator=torch.Generator().manual_seed(group.rank), dtype=torch.float64)
                x = (x * 100).to(dtype)
                if isinstance(group.choice, MeasuredChoice):
                    taken.add(tuning._short_name(group.choice.all_reduce(x, "sum")))
                found += [group.all_reduce(x.clone()), group.reduce(x.clone(), size - 1), group.broadcast(x.clone(), 1)]
        return found

    want = run_ranks(local_groups(size), work)
    for seed in range(12):
        groups = local_groups(size)
        for group in groups:
            group.choice = MeasuredChoice(some_network(size, seed))
        for ours, theirs in zip(run_ranks(groups, work), want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert size == 2 or len(taken) > 1, "other networks, other ways"


def test_the_line_says_the_worst_way_between_machines_and_each_way_to_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(group: Group, host: str) -> NetworkModel:
        group.choice = MeasuredChoice(SLOW)
        return SLOW

    monkeypatch.setattr(tuning, "tune_group", tuned)
    (line, *_) = [tune_between_hosts(group, ["a", "b", "c"]) for group in local_groups(3, name="dp")]
    assert line.startswith("dp: 3 ranks on 3 machines, 5.00 ms, 12 MB/s; sums: one_shot up to ")
    for length, name in ((1 << 10, "one_shot"), (1 << 26, "two_step")):
        assert (
            tuning._short_name(MeasuredChoice(SLOW).all_reduce(torch.empty(length // 4, device="meta"), "sum")) == name
        )
    assert "two_step" in line


def test_groups_between_machines_are_measured_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PAIR_SECONDS", 0.002)
    for hosts, measured in ((["a", "a"], False), (["a", "b"], True)):
        groups = local_groups(2)
        lines = run_ranks(groups, lambda group, hosts=hosts: tune_between_hosts(group, hosts))
        assert all(bool(line) == measured for line in lines) and lines[0] == lines[1]
        assert all(isinstance(group.choice, MeasuredChoice) == measured for group in groups)
    (alone,) = local_groups(1)
    assert tune_between_hosts(alone, ["a"]) == ""
