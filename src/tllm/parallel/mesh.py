"""`Mesh`: where this rank stands in a plan: its stage, its tensor-parallel group, its part of each cut axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from tllm.comm.collectives.group import Group, solo
from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.sequence_parallel import SequenceParallelRegion, TensorParallelRegion
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates. `layers` are those of its pipeline stage, `tp` are the ranks that share them.

    - `cut`: this rank's part of each axis that tensor parallelism cuts.
    - `sequence`: sequence parallelism: norms and the residual work on a slice of the tokens on each rank of `tp`.
    - `ep`: the ranks at this place of several replicas, each of which has some of the experts for all of them.
    - `balance`: the load-balance loss of the experts, in training.
    """

    stage: int
    pp: int
    layers: range
    tp: Group
    cut: Cut
    sequence: bool = False
    ep: Group = field(default_factory=solo)
    balance: LoadBalance | None = None

    @property
    def seam(self) -> TensorParallelRegion:
        """How rows enter and leave the layers that are cut between the ranks of `tp`."""
        return SequenceParallelRegion(self.tp) if self.sequence and self.tp.size > 1 else TensorParallelRegion(self.tp)


def mesh_of(
    spec: ModelSpec,
    plan: Plan,
    rank: int,
    tp: Group,
    sequence: bool = False,
    ep: Group | None = None,
    balance: LoadBalance | None = None,
) -> Mesh:
    """The mesh of a global rank; `tp` is its stage's group, `ep` its group over the plan's `ep` replicas."""
    index, place = plan.place(rank)
    stage = plan.stages[index]
    assert (tp.rank, tp.size) == (place, stage.tp), "the group given is not this stage's"
    ep = ep or solo()
    assert ep.size == plan.ep, "the group given is not the plan's"
    cut = cut_stage(spec, stage.shares, plan.experts, plan.ep)[place]
    return Mesh(index, plan.pp, range(stage.start, stage.stop), tp, cut, sequence, ep, balance)


def whole(spec: ModelSpec) -> Mesh:
    """The mesh of a model that is not cut."""
    return Mesh(stage=0, pp=1, layers=range(spec.num_layers), tp=solo(), cut=cut_stage(spec, (1,))[0])
