"""Logits, losses and gradients of a model on a grid of ranks, which are threads of this process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.support.models.layouts import in_threads, spec_of
from tests.support.models.reference_gradients import Gradients, put_together, sum_partial
from tests.support.models.slow_load import slow_load
from tllm.comm.collectives.group import Group, local_groups
from tllm.model.transformer import Transformer, build
from tllm.parallel.cross_entropy import cross_entropy
from tllm.parallel.grid.grid_mesh import GridMesh, grid_mesh_of
from tllm.spec.grid.dealt_documents import dealt_documents
from tllm.spec.plan import Plan
from tllm.training.attention.grid_tokens import grid_tokens
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens


@dataclass
class GridRank:
    """One rank's model, and what it has of the microbatch."""

    model: Transformer
    mesh: GridMesh
    tokens: Tokens

    def forward(self) -> tuple[Tensor, Tensor]:
        """The loss summed over this rank's tokens, and logits of its part of the vocabulary."""
        tokens = self.tokens
        attend = TrainAttend(self.model.attention_specs(), tokens)
        x_TD = self.model(tokens.ids_T, tokens.positions_T, attend, lengths_T=tokens.lengths_T)
        logits_TV = self.model.logits(x_TD)
        shown_TV = logits_TV.detach().clone()  # the memory of logits becomes that of their gradient
        return cross_entropy(logits_TV, tokens.labels_T, self.model.vocab, self.mesh.tp).sum(), shown_TV


def ranks_on_grid(folder: Path, plan_text: str, tokens: Tokens, dtype: torch.dtype) -> list[GridRank]:
    spec = spec_of(folder)
    plan = Plan.parse(plan_text, spec.num_layers)
    ranks = []
    for rank, stage in enumerate(local_groups(plan.world_size)):
        mesh = grid_mesh_of(spec, plan, rank, stage)
        model = build(spec, mesh, dtype).requires_grad_()
        slow_load(model, folder)
        ranks.append(GridRank(model, mesh, grid_tokens(tokens, mesh.grid)))
    return ranks


def gradients_on_grid(ranks: list[GridRank], tokens: Tokens, folder: Path) -> tuple[Tensor, Tensor, Gradients]:
    """The mean loss, logits [T, V] of the microbatch, and gradients put together from the pieces of all ranks."""
    outs = in_threads([rank.forward for rank in ranks])
    in_threads([partial((loss / tokens.predicted).backward) for loss, _ in outs])
    groups = local_groups(len(ranks))
    in_threads([partial(_sum_parts, rank, group) for rank, group in zip(ranks, groups, strict=True)])
    spec, shape = ranks[0].model.spec, ranks[0].mesh.grid.shape
    loss, dealt = torch.zeros((), dtype=torch.float64), dealt_documents(tokens.lengths, shape.token_blocks)
    documents = [torch.full((length, spec.vocab_size), float("nan"), dtype=torch.float64) for length in tokens.lengths]
    for rank, (of_rank, logits_TV) in zip(ranks, outs, strict=True):
        at = rank.mesh.grid.at
        loss += of_rank.detach() if at.column == 0 else 0.0
        block = dealt[shape.inner_block(at)]
        for number, of_document in zip(block, logits_TV.split(rank.tokens.lengths), strict=False):
            documents[number][:, slice(*rank.model.vocab)] = of_document
    return loss / tokens.predicted, torch.cat(documents), put_together([rank.model for rank in ranks], folder)


def _sum_parts(rank: GridRank, replica: Group) -> None:
    sum_partial(list(rank.model.parameters()), replica)
