"""NEFTune (Jain et al., 2310.05914): uniform noise on the embeddings of the tokens that are trained on.

The noise comes from a counter-based random generator, as the dropout of adapters does. It depends on seed, step, row,
token and column alone, so every plan has the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tllm.kernels.splitmix64 import counter_random
from tllm.parallel.embedding import VocabEmbedding
from tllm.parallel.expert_dispatch import ExpertRows
from tllm.parallel.linear import Adapt
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.seeds import DRAWS, key_for
from tllm.training.lora.trained_adapter import MakeAdapt

PLACES = 53
"""Bits of a number that float64 holds exactly."""


def with_noise(make_adapt: MakeAdapt, alpha: float) -> MakeAdapt:
    """The same with noise on the embeddings of every microbatch; as it is where `alpha` is 0."""
    if not alpha:
        return make_adapt
    return lambda chunk, tokens: NoisyEmbeddings(make_adapt(chunk, tokens), tokens, alpha)


@dataclass(frozen=True, eq=False)
class NoisyEmbeddings:
    """An `Adapt` that adds noise to the embeddings of a microbatch and leaves the linears to another."""

    adapt: Adapt
    tokens: Tokens
    alpha: float

    def __call__(self, linear: nn.Module, x_TD: Tensor, y_TF: Tensor, rows: ExpertRows | None = None) -> Tensor:
        if not isinstance(linear, VocabEmbedding):
            return self.adapt(linear, x_TD, y_TF, rows)
        draws_T, lengths_T = (linear.seam.own(x_T) for x_T in (self.tokens.of_tokens[DRAWS], self.tokens.lengths_T))
        return y_TF + uniform_noise(draws_T, lengths_T, y_TF.shape[1], self.alpha).to(y_TF)


def uniform_noise(draws_T: Tensor, lengths_T: Tensor, columns: int, alpha: float) -> Tensor:
    """Noise in ±alpha / sqrt(length columns), [T, columns], float64.

    `draws_T`: a number of each token's own, int64; `lengths_T`: the tokens of its document.
    """
    parts = [number_TD.double() for number_TD in counter_random(draws_T, key_for("neftune"), 0, columns, PLACES)]
    size_T = alpha / (lengths_T.double() * columns).sqrt()
    return (torch.cat(parts) * 2.0 ** (1 - PLACES) - 1) * size_T[:, None]
