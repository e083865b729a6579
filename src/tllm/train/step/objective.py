"""What is learned: `NextToken`, the cross-entropy of each token that a row says is to be predicted."""

from __future__ import annotations

from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.parallel.cross_entropy import cross_entropy
from tllm.parallel.mesh import Mesh
from tllm.train.data.batch_tensors import Tokens
from tllm.train.data.encoder import IGNORED


class NextToken:
    """An `Objective`: the sum over predicted tokens of -log p(label). Where it can, it makes logits for these alone."""

    def __init__(self, mesh: Mesh) -> None:
        self.tp = mesh.tp
        self.sliced = mesh.sequence and mesh.tp.size > 1  # then the rows to be left out lie on several ranks

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        labels_T = tokens.labels_T
        predicted_T = labels_T != IGNORED
        if not self.sliced and not bool(predicted_T.all()):
            x_TD, labels_T = x_TD[predicted_T], labels_T[predicted_T]
        return cross_entropy(model.logits(x_TD, len(labels_T)), labels_T, model.vocab, self.tp).sum()
