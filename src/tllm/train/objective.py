"""What is learned: `NextToken`, the cross-entropy of each token that a row says is to be predicted."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.train.encode import IGNORED
from tllm.train.tensors import Tokens


class NextToken:
    """An `Objective`: the sum over predicted tokens of -log p(label); logits are worked out for these alone."""

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        predicted_T = tokens.labels_T != IGNORED
        labels_T = tokens.labels_T
        if not bool(predicted_T.all()):
            x_TD, labels_T = x_TD[predicted_T], labels_T[predicted_T]
        return F.cross_entropy(model.logits(x_TD), labels_T, reduction="sum")
