"""`Mesh`: where this rank stands in a plan: its stage, its tensor-parallel group, its part of each cut axis."""

from __future__ import annotations

from dataclasses import dataclass

from tllm.comm.group import Group, solo
from tllm.parallel.seam import Seam, SlicedSeam
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates. `layers` are those of its stage; `tp` sums over the ranks that share them.

    `sequence`: what is not cut (norms, the residual) works on a slice of the tokens on each rank of `tp`.
    """

    stage: int
    pp: int
    layers: range
    tp: Group
    cut: Cut
    sequence: bool = False

    @property
    def seam(self) -> Seam:
        """What lies between the cut layers and the rest."""
        return SlicedSeam(self.tp) if self.sequence and self.tp.size > 1 else Seam(self.tp)


def mesh_of(spec: ModelSpec, plan: Plan, rank: int, tp: Group, sequence: bool = False) -> Mesh:
    """The mesh of a global rank; `tp` is its stage's group."""
    index, place = plan.place(rank)
    stage = plan.stages[index]
    assert (tp.rank, tp.size) == (place, stage.tp), "the group given is not this stage's"
    cut = cut_stage(spec, stage.shares, plan.experts)[place]
    return Mesh(stage=index, pp=plan.pp, layers=range(stage.start, stage.stop), tp=tp, cut=cut, sequence=sequence)


def whole(spec: ModelSpec) -> Mesh:
    """The mesh of a model that is not cut."""
    return Mesh(stage=0, pp=1, layers=range(spec.num_layers), tp=solo(), cut=cut_stage(spec, (1,))[0])
