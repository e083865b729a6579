"""Products on grids of ranks: values and gradients in float64 against the plain product of whole matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups
from tllm.parallel.grid import cube, summa
from tllm.parallel.grid.cube import cube_into, cube_out
from tllm.parallel.grid.grid import Grid, blocks
from tllm.parallel.grid.summa import summa_into, summa_out
from tllm.spec.grid.grid_shape import GridShape

SHAPES = [
    GridShape("2d", 2),
    GridShape("2d", 3),
    GridShape("2d", 4),
    GridShape("2.5d", 2, 2),
    GridShape("2.5d", 2, 4),
    GridShape("3d", 2, 2),
    GridShape("3d", 3, 3),
]
D, F, TOKENS = 31, 13, 3  # sizes that no side divides; tokens in each block


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x: Tensor, count: int, index: int, dim: int) -> Tensor:
    start, stop = blocks(x.shape[dim], count)[index]
    return x.narrow(dim, start, stop - start)


def errors_there_and_back(shape: GridShape, stage: Group) -> list[float]:
    """How far this rank's blocks of y = x W^T, z = y V^T and of all gradients are from those of whole matrices."""
    grid, at = Grid(shape, stage), shape.place(stage.rank)
    into, out_of = (cube_into, cube_out) if shape.mode == "3d" else (summa_into, summa_out)
    rows = TOKENS * shape.token_blocks
    whole = [values(0, rows, D), values(1, F, D), values(2, D, F), values(3, rows, F), values(4, rows, D)]
    x, w, v = (one.clone().requires_grad_() for one in whole[:3])
    y = x @ w.t()
    z = (y * whole[3]) @ v.t()
    (z * whole[4]).sum().backward()
    outer, inner = shape.outer_block(at), shape.inner_block(at)

    def outside(one: Tensor) -> Tensor:
        first, last = grid.hidden_range(D)
        return part(one, shape.token_blocks, outer, 0)[:, first:last]

    def inside(one: Tensor) -> Tensor:
        return part(part(one, shape.token_blocks, inner, 0), shape.side, at.column, 1)

    first, last = grid.weight_range(D)
    mine_w = part(whole[1], shape.side, at.column, 0)[:, first:last].clone().requires_grad_()
    mine_v = part(whole[2], shape.side, at.column, 1)[first:last].clone().requires_grad_()
    mine_x = outside(whole[0]).clone().requires_grad_()
    mine_y = into(mine_x, mine_w, grid, D)
    mine_z = out_of(mine_y * inside(whole[3]), mine_v, grid, D)
    (mine_z * outside(whole[4])).sum().backward()
    of_w, of_v = mine_w.grad, mine_v.grad
    assert x.grad is not None and w.grad is not None and v.grad is not None
    assert mine_x.grad is not None and of_w is not None and of_v is not None
    if grid.shares_weights:  # each layer of the grid has the part of its own tokens
        of_w, of_v = grid.depth.all_reduce(of_w.clone()), grid.depth.all_reduce(of_v.clone())
    pairs = [
        (mine_y, inside(y)),
        (mine_z, outside(z)),
        (mine_x.grad, outside(x.grad)),
        (of_w, part(w.grad, shape.side, at.column, 0)[:, first:last]),
        (of_v, part(v.grad, shape.side, at.column, 1)[first:last]),
    ]
    assert all(got.shape == want.shape for got, want in pairs)
    return [float((got.detach() - want.detach()).abs().max() / want.detach().abs().max()) for got, want in pairs]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.mode}-{shape.ranks}")
def test_products_and_gradients_are_those_of_whole_matrices(shape: GridShape) -> None:
    for errors in run_ranks(local_groups(shape.ranks), lambda stage: errors_there_and_back(shape, stage)):
        assert max(errors) < 1e-14, errors


@pytest.mark.parametrize("shape", [GridShape("2d", 2), GridShape("3d", 2, 2)], ids=["2d", "3d"])
def test_a_sum_that_is_left_out_shows(shape: GridShape, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_part(part: Tensor, group: Group, root: int, out: Tensor) -> None:
        if group.rank == root:
            out.copy_(part)

    def own_rows(x: Tensor, group: Group, sizes: list[int], dim: int = 0) -> Tensor:
        return x.split(sizes, dim)[group.rank].clone()

    wrong: dict[str, tuple[object, str, Callable[..., object]]] = {
        "2d": (summa, "collect", first_part),
        "3d": (cube, "scattered", own_rows),
    }
    monkeypatch.setattr(*wrong[shape.mode])
    errors = run_ranks(local_groups(shape.ranks), lambda stage: errors_there_and_back(shape, stage))
    assert max(map(max, errors)) > 0.1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.mode}-{shape.ranks}")
def test_each_block_of_the_embedding_comes_from_all_parts_of_the_vocabulary(shape: GridShape) -> None:
    """Who takes a block knows by whom it is given, and each part of the vocabulary covers its columns once."""
    grids = [Grid(shape, group) for group in local_groups(shape.ranks)]
    given = {(giver, taker) for giver, grid in enumerate(grids) for taker in grid.takers()}
    assert given == {(giver, taker) for taker, grid in enumerate(grids) for giver, _ in grid.givers(D)}
    for grid in grids:
        start, stop = grid.hidden_range(D)
        covered = torch.zeros(stop - start, dtype=torch.int64)
        for _, (a, b) in grid.givers(D):
            covered[a:b] += 1
        assert covered.eq(shape.side).all()
