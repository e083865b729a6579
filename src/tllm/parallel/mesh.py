"""`Mesh`: where this rank stands in a plan: its stage, its tensor-parallel group, its part of each cut axis.

`CutLayers` makes the layers that are cut as they are on the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import nn

from tllm.comm.collectives.group import Group, solo
from tllm.parallel.embedding import VocabEmbedding, VocabLogits, vocab_parameter
from tllm.parallel.linear import ColumnLinear, LinearRows, RowLinear
from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.sequence_parallel import SequenceParallelRegion, TensorParallelRegion
from tllm.spec.cut import Cut, Range, cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


class HiddenColumns(NamedTuple):
    """The columns of hidden states that a rank has, and the group of those who have the others of the same tokens."""

    held: Range
    group: Group


class CutLayers:
    """Makes linears, the embedding and logits: cut one way, which is Megatron-LM's, with hidden states whole.

    Without a `seam` the results of `row` are partial sums (`RowLinear`).
    """

    def __init__(self, seam: TensorParallelRegion | None) -> None:
        self.seam = seam

    def column(self, width: int, rows: list[LinearRows], bias: bool = False, replicated: bool = False) -> nn.Module:
        """x_TD -> x W^T + b, of these rows of W. `replicated`: other ranks may have the same rows."""
        return ColumnLinear(width, rows, bias, replicated)

    def row(self, name: str, columns: Range, width: int, bias: bool = False) -> nn.Module:
        """x_TF -> x W^T + b, of these columns of W."""
        return RowLinear(name, columns, width, self.seam, bias)

    def table(self, name: str, vocab: Range, width: int, replicated: bool = False) -> nn.Parameter:
        """The rows [vocab) of a table of embeddings."""
        return vocab_parameter(name, vocab, width, replicated)

    def embedding(self, table: nn.Parameter, vocab: Range, scale: float) -> nn.Module:
        """ids_T -> x_TD."""
        assert self.seam is not None, "partial sums of an embedding are not wanted anywhere"
        return VocabEmbedding(table, vocab, self.seam, scale)

    def logits(self, table: nn.Parameter, vocab: Range, softcap: float | None, scaling: float) -> nn.Module:
        """x_TD -> logits_TV."""
        return VocabLogits(table, vocab, softcap, scaling)


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
    def stage_group(self) -> Group:
        """All ranks of its stage."""
        return self.tp

    @property
    def copies(self) -> Group:
        """The ranks of its stage that have the same weights and divide the tokens: itself alone."""
        return solo()

    @property
    def seam(self) -> TensorParallelRegion:
        """How rows enter and leave the layers that are cut between the ranks of `tp`."""
        return SequenceParallelRegion(self.tp) if self.sequence and self.tp.size > 1 else TensorParallelRegion(self.tp)

    @cached_property
    def cut_layers(self) -> CutLayers:
        """What makes the layers that are cut between ranks."""
        return CutLayers(self.seam)

    def hidden(self, width: int) -> HiddenColumns:
        """Which of the `width` columns of hidden states are here: all of them."""
        return HiddenColumns((0, width), solo())


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
    assert plan.grid_of(index) is None, "a grid has a mesh of its own"
    assert (tp.rank, tp.size) == (place, stage.tp), "the group given is not this stage's"
    ep = ep or solo()
    assert ep.size == plan.ep, "the group given is not the plan's"
    cut = cut_stage(spec, stage.shares, plan.experts, plan.ep)[place]
    return Mesh(index, plan.pp, range(stage.start, stage.stop), tp, cut, sequence, ep, balance)


def whole(spec: ModelSpec) -> Mesh:
    """The mesh of a model that is not cut."""
    return Mesh(stage=0, pp=1, layers=range(spec.num_layers), tp=solo(), cut=cut_stage(spec, (1,))[0])
