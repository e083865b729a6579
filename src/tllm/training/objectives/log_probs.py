"""Log-probabilities of the tokens of a microbatch, and their sums over documents, of which objectives are made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.kernels.gpu_kernels import gpu_kernels
from tllm.model.transformer import Transformer
from tllm.parallel.cross_entropy import cross_entropy
from tllm.parallel.embedding import VocabLogits
from tllm.parallel.mesh import Mesh
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED


class TokenLosses:
    """(model, hidden_TD, tokens) -> -log p(label) of this rank's tokens whose label is not IGNORED, in their order.

    Logits are computed for these tokens alone, unless sequence parallelism has the rows of one token on several ranks:
    then the result has a place for each token, with 0 where nothing is predicted. `precise`: from logits of bfloat16
    they are computed in float32, as sums over whole replies are to be compared.
    """

    fuses = True
    """Whether a GPU's kernel may make the losses of the head's product; not of logits that are changed before."""

    def __init__(self, mesh: Mesh, precise: bool = False) -> None:
        self.tp, self.precise = mesh.tp, precise
        self.sliced = not mesh.seam.has_all_rows

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        labels_T = tokens.labels_T
        if not self.sliced and (learned_T := tokens.learned_T) is not None:
            x_TD, labels_T = x_TD.index_select(0, learned_T), labels_T.index_select(0, learned_T)
        is_whole = self.fuses and self.tp.size == 1 and x_TD.dtype != torch.float64
        if is_whole and (gpu := gpu_kernels(x_TD.device.type)) is not None:
            head = model.lm_head
            if isinstance(head, VocabLogits) and head.is_product:
                logits_TV = head(model.normed(x_TD), widens=False)
                losses: Tensor = gpu.loss.cross_entropy(logits_TV, labels_T, IGNORED)
                return losses
        return cross_entropy(self.logits(model, x_TD, len(labels_T)), labels_T, model.vocab, self.tp)

    def logits(self, model: Transformer, x_TD: Tensor, tokens: int) -> Tensor:
        """Of these rows, as their probabilities are taken; they may be written to."""
        logits_TV = model.logits(x_TD, tokens)
        return logits_TV.float() if self.precise and logits_TV.dtype == torch.bfloat16 else logits_TV

    def log_probs(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        """log p(label) of each token here, [T]; 0 where nothing is predicted."""
        losses = self(model, x_TD, tokens)
        if len(losses) == len(tokens.labels_T):
            return -losses
        return losses.new_zeros(len(tokens.labels_T)).masked_scatter(tokens.labels_T != IGNORED, -losses)


def document_sums(x_T: Tensor, tokens: Tokens, cp: Group) -> Tensor:
    """The sum of x over each document of the microbatch, [documents], wherever its tokens are.

    Every cp rank gets the whole sums and makes the same of them; each gradient then goes to the rank's own tokens.
    """
    sums_N = x_T.new_zeros(len(tokens.lengths)).index_add(0, tokens.document_T, x_T)
    return sum_over_ranks(sums_N, cp)


def sum_over_ranks(x_N: Tensor, group: Group) -> Tensor:
    """The sum over ranks that all make the same of it, so that the gradient is whole on each."""
    return x_N if group.size == 1 else _SumOverRanks.apply(x_N, group)  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x_N.clone())

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None]:
        return gradient_N, None
