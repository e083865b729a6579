"""Optimizers (AdamW, SGD) on flat tensors. Each is a stateless rule; its state is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tllm.training.job.job import Job


class Optimizer(Protocol):
    """`states` are the names of the tensors that it keeps beside the weights, each as large as they, zero at first."""

    states: ClassVar[tuple[str, ...]]

    def update(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        """Update `weights` in place by step `step`, counted from 1; `gradient` may be overwritten."""


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (1711.05101), by torch's fused kernel."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def update(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        adamw(
            [weights],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.full((), float(step - 1), device=weights.device)],  # counted up before it is used
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.epsilon,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum, as torch.optim.SGD writes it: weight decay is added to the gradient."""

    states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    momentum: float = 0.9
    nesterov: bool = False

    def update(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        if weight_decay:
            gradient = gradient.add(weights, alpha=weight_decay)
        velocity = state["momentum_buffer"].mul_(self.momentum).add_(gradient)
        weights.add_(gradient.add(velocity, alpha=self.momentum) if self.nesterov else velocity, alpha=-learning_rate)


def optimizer_of(job: Job) -> Optimizer:
    """The rule that moves the weights."""
    if job.optimizer == "sgd":
        return SGD(momentum=job.momentum)
    return AdamW(beta1=job.adam_beta1, beta2=job.adam_beta2, epsilon=job.adam_epsilon)
