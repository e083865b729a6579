from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.models.layouts import in_threads
from tests.unit.training.parameter_server.test_segments import parameters_of
from tllm.comm.collectives.group import local_groups
from tllm.training.gradients.bucket_layout import lay_out
from tllm.training.optim.optimizer import SGD, AdamW, Optimizer
from tllm.training.parameter_server.segments import ServerSegment, segments
from tllm.training.parameter_server.server_state import Gradient, ServerState, tree_sum

SHAPES = ((9, 7), (21, 5), (30, 11), (5,))
TABLE = 1


def state_of(
    server: int, servers: int, dtype: torch.dtype = torch.float32, optimizer: Optimizer | None = None
) -> ServerState:
    parameters = parameters_of(*SHAPES, dtype=dtype)
    buckets = lay_out(parameters, limit=2000)
    cut = segments(buckets, parameters, TABLE, server, servers)
    return ServerState(parameters, buckets, cut, optimizer or AdamW())


@pytest.mark.parametrize("replicas", range(1, 8))
def test_sums_are_those_of_a_group_to_the_bit(replicas: int) -> None:
    cut = [ServerSegment(0, 0, 64), ServerSegment(0, 64, 192, rows=40, row=3)]
    dice = torch.Generator().manual_seed(replicas)
    dense = [torch.randn(64, generator=dice) for _ in range(replicas)]
    rows = [torch.randperm(40, generator=dice)[: 5 + r].sort().values.int() for r in range(replicas)]
    values = [torch.randn(len(of), 3, generator=dice) for of in rows]
    tables = [torch.zeros(40, 3).index_copy(0, of.long(), x) for of, x in zip(rows, values, strict=True)]
    silent = replicas // 2 if replicas > 2 else None  # one of them has nothing to learn from
    if silent is not None:
        dense[silent].zero_()
        tables[silent].zero_()
    groups = local_groups(replicas)
    want_dense = in_threads([lambda g=g: g.all_reduce(dense[g.rank].clone()) for g in groups])[0]
    want_table = in_threads([lambda g=g: g.all_reduce(tables[g.rank].clone()) for g in groups])[0]
    gradients = [
        None if r == silent else Gradient([dense[r].clone(), values[r].clone()], rows[r]) for r in range(replicas)
    ]
    got = tree_sum(gradients, cut)
    assert got is not None and torch.equal(got.parts[0], want_dense)
    assert torch.equal(torch.zeros(40, 3).index_copy(0, got.rows.long(), got.parts[1]), want_table)


def test_no_gradient_has_no_sum() -> None:
    assert tree_sum([None, None, None], []) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_the_formula(dtype: torch.dtype) -> None:
    states = [state_of(server, 3, dtype) for server in range(3)]
    size = sum(bucket.size for bucket in states[0].buckets)
    wide = 4 if dtype == torch.bfloat16 else 0
    assert sum(state.weight_bytes for state in states) == size * dtype.itemsize
    assert sum(state.state_bytes for state in states) == size * (8 + wide)
    row = 80 * 4 * len(states[0].buckets)  # lcm of 5 and 16 elements, which is what a border may move by
    each = [state.weight_bytes + state.state_bytes for state in states]
    assert all(abs(bytes_held - size * (dtype.itemsize + 8 + wide) / 3) <= row * 4 for bytes_held in each)


def test_rows_that_nobody_pushed_move_by_what_is_remembered() -> None:
    state = state_of(0, 1, optimizer=SGD(momentum=0.5))
    place = next(i for i, segment in enumerate(state.segments) if segment.row)
    seen: list[Tensor] = []
    for number, pushed in ((1, [3]), (2, [4])):
        rows = torch.tensor(pushed, dtype=torch.int32)
        parts = [torch.ones(1, 5) if segment.row else torch.zeros(segment.size) for segment in state.segments]
        state.update(Gradient(parts, rows), number, learning_rate=1.0)
        seen.append(state.weights(torch.tensor([3, 4, 5]))[place])
    assert seen[0][:, 0].tolist() == [-1.0, 0.0, 0.0]
    assert seen[1][:, 0].tolist() == [-1.5, -1.0, 0.0]


def test_squares_count_no_filling_between_parameters() -> None:
    state = state_of(0, 1)
    parts = [torch.ones(2, 5) if segment.row else torch.ones(segment.size) for segment in state.segments]
    want = 2 * 5 + 9 * 7 + 30 * 11 + 5
    assert state.square(Gradient(parts, torch.tensor([0, 7], dtype=torch.int32))) == pytest.approx(want, rel=1e-12)
