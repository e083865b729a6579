"""`FrozenModel`: a model whose weights are not trained (a teacher, a reward model), whole or one rank's part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tllm.model.layer import Observe, unobserved
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import Mesh, mesh_of, whole
from tllm.spec.cut import cut_stage
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import tokens_of
from tllm.training.data.packing import PackedRow
from tllm.training.step.model_chunks import build_chunks
from tllm.training.step.rank_groups import Groups
from tllm.weights.byte_source import ByteSource
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import Progress, load
from tllm.weights.manifest import checked

ALONE = Groups()


class FrozenModel:
    """Forward passes of one row at a time. Every rank of the `plan`, None for a whole model, makes the same calls, and
    loads its part of the weights only."""

    def __init__(self, model: Transformer, mesh: Mesh, groups: Groups = ALONE, plan: Plan | None = None) -> None:
        self.model, self._mesh, self._groups, self.plan = model, mesh, groups, plan
        self._columns = [(0, model.spec.vocab_size)]
        if plan is not None:
            cuts = cut_stage(model.spec, plan.stages[-1].shares, plan.experts)
            self._columns = [cut.vocab for cut in cuts]

    @classmethod
    def load(
        cls,
        config: dict[str, Any],
        source: ByteSource,
        dtype: str,
        plan: Plan | None = None,
        rank: int = 0,
        groups: Groups = ALONE,
        progress: Progress | None = None,
    ) -> FrozenModel:
        """The part of a rank; without a plan the whole model. `progress` hears of the bytes that are read."""
        spec, source = spec_from_config(config), checked(source)
        mesh = whole(spec) if plan is None else mesh_of(spec, plan, rank, groups.tp)
        runs = [range(spec.num_layers)] if plan is None else plan.runs
        (model,) = build_chunks(spec, mesh, runs, torch_dtype(dtype))
        load(model, open_index(source, config), source, torch_dtype(dtype), progress)
        return cls(model.requires_grad_(False), mesh, groups, plan)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def is_cut(self) -> bool:
        """Whether others have parts of the model."""
        return self._groups.world.size > 1

    @property
    def tells(self) -> bool:
        """Whether this rank tells what its stage has found, which all ranks of a stage have alike."""
        return self._groups.tp.rank == 0

    def __call__(self, row: PackedRow, observe: Observe = unobserved) -> Tensor | None:
        """The last layer's rows [T, D], on the ranks that have it; None on the others."""
        tokens, model, wires, stage = tokens_of([row]), self.model, self._groups.wires, self._mesh.stage
        x = tokens.ids_T
        if not model.is_first:
            shape = (len(tokens.ids_T), model.received_width)
            x = wires.recv[stage - 1].recv(shape, next(model.parameters()).dtype)
        attend = TrainAttend(model.attention_specs(), tokens)
        x_TD: Tensor = model(x, tokens.positions_T, attend, tokens.lengths_T, ids_T=tokens.ids_T, observe=observe)
        if model.is_last:
            return x_TD
        for link in wires.send.get(stage + 1, ()):
            link.send(x_TD)
        return None

    def logits(self, x_PD: Tensor) -> Tensor:
        """Of all tokens [P, V], alike on every rank of the last stage."""
        mine_PV, tp = self.model.logits(x_PD), self._groups.tp
        if tp.size == 1:
            return mine_PV
        shapes = [(len(x_PD), stop - start) for start, stop in self._columns]
        return torch.cat(tp.all_gather(mine_PV.contiguous(), shapes), -1)

    def gathered(self, found: bytes, limit: int) -> list[bytes]:
        """What every rank has found, on the first, in their order; nothing on the others."""
        return self._groups.world.gather_bytes(found, limit)
