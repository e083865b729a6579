"""`NextTokenLoss`: the objective of pre-training and of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.parallel.mesh import Mesh
from tllm.training.data.batch_tensors import Tokens
from tllm.training.objectives.log_probs import TokenLosses
from tllm.training.objectives.objective import MicrobatchLoss


class NextTokenLoss:
    """An `Objective`: the cross-entropy -log p(label), summed over the tokens whose label is not IGNORED."""

    metric_names: tuple[str, ...] = ()

    def __init__(self, mesh: Mesh) -> None:
        self.losses = TokenLosses(mesh)

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        return MicrobatchLoss(self.losses(model, x_TD, tokens).sum())
