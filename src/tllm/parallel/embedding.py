"""Token embedding and output logits over a vocabulary that is cut between ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tllm.parallel.linear import Adapt, matmul, unadapted
from tllm.parallel.quantized_weight import quantized, stands_for
from tllm.parallel.sequence_parallel import TensorParallelRegion
from tllm.parallel.shard import Gradient, Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range


def vocab_parameter(name: str, vocab: Range, width: int, replicated: bool = False) -> nn.Parameter:
    """Rows [vocab) of a table of the whole vocabulary. `replicated`: first and last stage both hold a tied table."""
    piece = ShardPiece(name, source=(vocab, (0, width)))
    gradient: Gradient = "partial" if replicated else "whole"
    return cut_parameter((vocab[1] - vocab[0], width), Shard((piece,), replicated, gradient))


def ids_held(ids: Tensor, vocab: Range) -> tuple[Tensor, Tensor]:
    """Which ids are in [vocab), and the place of each there. That of another id is of one that is, which may be read
    in its stead and then counts as nothing."""
    start, stop = vocab
    return (ids >= start) & (ids < stop), (ids - start).clamp(0, stop - start - 1)


class VocabEmbedding(nn.Module):
    """x_TD = scale * table[ids_T]: each rank looks up the ids it holds and the sum brings them together.

    `adapt` is called with the ids and with x_TD as it is after the sum.
    """

    def __init__(self, table: nn.Parameter, vocab: Range, seam: TensorParallelRegion, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = table
        self.vocab = vocab
        self.seam = seam
        self.scale = scale

    def forward(self, ids_T: Tensor, adapt: Adapt = unadapted) -> Tensor:
        (here_T, local_T), packed = ids_held(ids_T, self.vocab), quantized(self.weight)
        if packed is None:
            x_TD = F.embedding(local_T, self.weight)
        else:
            x_TD = packed.rows(local_T).to(stands_for(self.weight)[1])
        x_TD = self.seam.leave(x_TD * here_T.unsqueeze(-1))
        if self.scale != 1.0:  # in the weights' own dtype, as the models that scale were trained
            x_TD = x_TD * torch.tensor(self.scale, dtype=x_TD.dtype)
        return adapt(self, ids_T, x_TD)


class VocabLogits(nn.Module):
    """logits_TV of this rank's part of the vocabulary, in float32 (or float64), with an optional soft cap.

    They are divided by `scaling`. Without `widens` they stay in the dtype of their product.
    """

    def __init__(self, table: nn.Parameter, vocab: Range, softcap: float | None = None, scaling: float = 1.0) -> None:
        super().__init__()
        self.weight = table
        self.vocab = vocab
        self.softcap = softcap
        self.scaling = scaling

    def forward(self, x_TD: Tensor, widens: bool = True) -> Tensor:
        logits_TV = self.matmul(x_TD)
        if not widens:
            assert self.is_product, "what is done to logits after their product is done in float32"
            return logits_TV
        logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        logits_TV = logits_TV if self.scaling == 1.0 else logits_TV / self.scaling
        return logits_TV if self.softcap is None else torch.tanh(logits_TV / self.softcap) * self.softcap

    @property
    def is_product(self) -> bool:
        """Whether logits are the product and nothing else."""
        return self.softcap is None and self.scaling == 1.0

    def matmul(self, x_TD: Tensor) -> Tensor:
        """The product with this rank's part of the table."""
        return matmul(x_TD, self.weight)
