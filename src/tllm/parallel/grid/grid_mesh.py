"""Where a rank of a grid stands in a plan: `GridMesh` in training, `StationaryMesh` in serving."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tllm.comm.collectives.group import Group
from tllm.parallel.grid.grid import Grid
from tllm.parallel.grid.layers import GridLayers, GridRegion
from tllm.parallel.grid.stationary import StationaryLayers
from tllm.parallel.mesh import CutLayers, HiddenColumns, Mesh, mesh_of
from tllm.parallel.sequence_parallel import TensorParallelRegion
from tllm.spec.cut import cut_stage, stage_cuts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class GridMesh(Mesh):
    """`tp` are the ranks of its row, who have other heads, widths and vocabulary for the same tokens."""

    grid: Grid
    width: int

    @property
    def seam(self) -> TensorParallelRegion:
        return GridRegion(self.tp)

    @cached_property
    def cut_layers(self) -> CutLayers:
        return GridLayers(self.grid, self.width)

    def hidden(self, width: int) -> HiddenColumns:
        return HiddenColumns(self.grid.hidden_range(width), self.grid.hidden)


@dataclass(frozen=True, kw_only=True)
class StationaryMesh(Mesh):
    """`tp` are the ranks of its row, who have other heads, widths and vocabulary for the same part of D."""

    grid: Grid
    width: int

    @property
    def stage_group(self) -> Group:
        return self.grid.stage

    @property
    def copies(self) -> Group:
        return self.grid.copies

    @cached_property
    def cut_layers(self) -> CutLayers:
        return StationaryLayers(self.grid, self.width)

    def hidden(self, width: int) -> HiddenColumns:
        return HiddenColumns(self.grid.weight_range(width), self.grid.width)


def grid_mesh_of(spec: ModelSpec, plan: Plan, rank: int, tp: Group) -> Mesh:
    """The mesh of a global rank of a plan with a grid; `tp` is its stage's group."""
    index, place = plan.place(rank)
    stage, shape = plan.stages[index], plan.grid
    assert shape is not None and (tp.rank, tp.size) == (place, stage.tp), "the group given is not this stage's"
    grid = Grid(shape, tp)
    cut = cut_stage(spec, (1,) * shape.side)[grid.at.column]
    layers = range(stage.start, stage.stop)
    return GridMesh(index, plan.pp, layers, grid.row, cut, grid=grid, width=spec.hidden_size)


def serving_mesh_of(spec: ModelSpec, plan: Plan, rank: int, tp: Group) -> Mesh:
    """The mesh of a global rank of a plan that serves, with a grid or without; `tp` is its stage's group."""
    index, place = plan.place(rank)
    shape = plan.grid_of(index)
    if shape is None:
        return mesh_of(spec, plan, rank, tp)
    stage, grid, cut = plan.stages[index], Grid(shape, tp), stage_cuts(spec, plan, index)[place]
    layers = range(stage.start, stage.stop)
    return StationaryMesh(index, plan.pp, layers, grid.row, cut, grid=grid, width=spec.hidden_size)
