"""The load-balance loss of a mixture of experts: what keeps the router from sending all tokens to a few (2101.03961).

With f_e the number of times expert e is chosen and P_e the mean probability the router gives it, both over the T tokens
of one microbatch, so that f adds up to K, the loss of one layer is equations 4 to 6 of the paper for K choices:

    aux = E sum_e (f_e / T) P_e        K where all experts are alike, up to E where all tokens choose the same

What is learned is the mean loss over tokens + coefficient * the mean of aux over the model's layers that have experts
and over the microbatches of the global batch. So it does not depend on which rank has which microbatch. Replicas that
learn from their own tokens alone for a while take the mean over their own microbatches. For one microbatch and one such
layer this is what `transformers` adds for `router_aux_loss_coef`; of several layers it takes f and P together before it
multiplies, so that one layer may there make up for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group, solo


class LoadBalance:
    """The loss of all layers of one rank. `layers` is how many layers of the whole model have experts.

    All ranks of `tp` route the same tokens to the same experts, and their gradients of the router are added; so only
    the first of them adds the loss's gradient. The ranks of `cp` have other tokens of the same microbatch, and f and T
    are counted over all of them.
    """

    def __init__(self, coefficient: float, layers: int, tp: Group | None = None, cp: Group | None = None) -> None:
        self.coefficient, self.layers = coefficient, layers
        self.tp, self.cp = tp or solo(), cp or solo()
        self.begin(1)

    def begin(self, microbatches: int, own: int | None = None) -> None:
        """Start a step with so many microbatches in the global batch, or none: of all replicas, not of this one.

        `own`: where a replica learns from its own microbatches alone, how many these are. What is learned is then the
        mean over them; what `mean` tells stays this rank's part of the mean over all.
        """
        self.scale = 1 / (max(microbatches, 1) * self.layers)
        self.gradient_scale = self.coefficient * max(microbatches, 1) / max(microbatches if own is None else own, 1)
        self._mean = torch.zeros((), dtype=torch.float64)
        self._chosen: dict[str, Tensor] = {}

    def apply(self, name: str, weights_TK: Tensor, probabilities_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The weights as they are; backward: the gradient of the loss of the layer `name` joins in."""
        if self.tp.rank or not weights_TK.requires_grad:
            return weights_TK
        number = probabilities_TE.shape[-1]
        mine_E = torch.bincount(experts_TK.flatten(), minlength=number)
        counts = self.cp.all_reduce(torch.cat([mine_E, mine_E.new_tensor([len(experts_TK)])]))
        # f and T are those of all ranks of cp and the probabilities this rank's: such parts add up to aux.
        chosen_E, tokens = counts[:-1].to(probabilities_TE.dtype), counts[-1]
        part = self.scale * number * (chosen_E * probabilities_TE.sum(0)).sum() / (tokens * tokens)
        value = part.detach()

        def record() -> None:
            self._mean += value.cpu()
            self._chosen[name] = self._chosen.get(name, 0) + mine_E

        return with_loss(weights_TK, part * self.gradient_scale, record)

    @property
    def mean(self) -> float:
        """This rank's part of the step's mean aux, without the coefficient: the sum over all ranks is the whole."""
        return float(self._mean)

    def loads(self) -> dict[str, Tensor]:
        """How often this rank's tokens have chosen each expert in this step, by layer; to be added over ranks."""
        return dict(self._chosen)


def with_loss(x: Tensor, loss: Tensor, record: Callable[[], None] = lambda: None) -> Tensor:
    """x as it is. In a backward pass through it the gradient of `loss`, a scalar, joins in, and `record` is called."""
    return _Attach.apply(x, loss, record)  # type: ignore[no-any-return, no-untyped-call]


class _Attach(torch.autograd.Function):
    """Records in the backward pass: it comes once for each microbatch, even where a forward pass is made again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, record: Callable[[], None]) -> Tensor:
        ctx.one, ctx.record = torch.ones_like(loss), record
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.record()
        return gradient, ctx.one, None
