"""What forward passes find of each document of a global batch, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.objectives.objective import MicrobatchLoss
from tllm.training.step.rank_groups import Groups
from tllm.training.step.rank_model import RankModel

PLACE = "place"
"""The number of each document by which its result is known, from 1: 0 is filling."""

OfDocuments = Callable[[Transformer, Tensor, Tokens], Tensor]
"""(model, hidden_TD, tokens) -> of each document of a microbatch one number, [documents], or several"""


class _Recorded:
    """An `Objective` that learns nothing, and keeps what is found of each document by its `PLACE`."""

    metric_names: tuple[str, ...] = ()

    def __init__(self, of_documents: OfDocuments, shape: tuple[int, ...]) -> None:
        self._of_documents = of_documents
        self.found = torch.zeros(shape, dtype=torch.float64)

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        found = self._of_documents(model, x_TD, tokens)
        self.found[tokens.of_documents[PLACE].long().cpu()] = found.double().cpu()
        return MicrobatchLoss(found.sum())


def results_by_place(
    model: RankModel, groups: Groups, batch: ReplicaBatch, of_documents: OfDocuments, shape: tuple[int, ...] = ()
) -> Tensor:
    """Of each place of a global batch, [1 + documents, *shape], in float64, with the weights that the model has now.

    `batch` is this replica's part of it, and `shape` that of what is found of one document. Every rank calls it.
    """
    recorded = _Recorded(of_documents, (len(batch.lengths) + 1, *shape))
    model.forward_only(batch.unpack(), recorded)
    speaks = groups.tp.rank == 0 and groups.cp.rank == 0
    return groups.world.all_reduce(recorded.found * speaks)
