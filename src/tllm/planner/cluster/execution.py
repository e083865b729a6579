"""`Execution`: how a trainer's software carries out a step. The defaults are tllm's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tllm.core.errors import ConfigError
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

GROUPS = ("tp", "cp", "ep", "dp", "edp", "replica")


@dataclass(frozen=True)
class Execution:
    """What a trainer does otherwise than tllm, for the simulator."""

    collectives: Literal["flat", "levels"] = "flat"
    """Whether each rank sends to each other one, or first inside nodes and then between them (`cost.link_levels`)."""
    overlap: tuple[tuple[str, float], ...] = ()
    """By group, the share of its messages that travels while products are computed, where tllm waits for them."""
    slowdown: float = 1.0
    """How many times longer products take while messages travel, as both use the device (Galvatron, 2211.13878,
    section 3.4)."""
    touches: float = 5.0
    """How often elementwise operations move what a layer of torch's steps keeps through memory, there and back. 5 where
    neighbouring operations are fused: written and read forward; read, and its gradient written and read, backward."""
    loss_touches: float | None = None
    """The same of logits, by the operations of the loss; left out, `touches`."""
    attention: float = 1.0
    """The share of the device's rate for attention scores that the kernel reaches."""
    recompute_share: float | None = None
    """The share of a layer's forward pass that is computed a second time, where the plan's `recompute` does not say."""
    scores: Literal["fused", "softmax", "dropout"] = "fused"
    """Whether attention's scores stay in one kernel (FlashAttention, 2205.14135), or all of them, masked ones too, go
    through memory for products and softmax, or for dropout as well (`cost.roofline.attention_time`)."""
    early_stop: bool = True
    """Whether a layer that is computed again stops at the last tensor that its backward pass wants, as torch's
    checkpoints call it, and so makes no sum at its very end; or is computed again whole."""
    fused_accumulation: bool = True
    """Whether the product that makes a weight's gradient adds it to those of earlier microbatches, or an operation of
    its own does."""
    overlap_gradients: bool = True
    """Whether all-reduces of gradients begin as the last backward pass fills buckets, or when it is done."""
    waits_for_hops: bool = False
    """Whether a stage computes nothing while it sends hidden states or gradients to the next, or is sent them."""
    gradient_passes: float = 3.0
    """How often float32 gradients are read or written between the last backward pass and the optimizer: 3 for a norm
    (read) and for clipping by it (read, written)."""

    def __post_init__(self) -> None:
        for group, share in self.overlap:
            if group not in GROUPS or not 0 <= share <= 1:
                raise ConfigError(
                    f"beside of [execution] has {group} = {share:g}", f"give shares of 0 to 1 of {', '.join(GROUPS)}"
                )
        if not self.slowdown >= 1:
            raise ConfigError(f"slowdown of [execution] is {self.slowdown:g}", "give 1 or more: products never gain")
        for name in ("touches", "loss_touches", "gradient_passes"):
            if not (getattr(self, name) or 0) >= 0:
                raise ConfigError(f"{name} of [execution] is {getattr(self, name):g}", "give 0 or more")
        if not 0 < self.attention <= 1:
            raise ConfigError(f"attention of [execution] is {self.attention:g}", "give a share above 0 and up to 1")
        if self.recompute_share is not None and not 0 <= self.recompute_share <= 1:
            raise ConfigError(f"again of [execution] is {self.recompute_share:g}", "give a share of 0 to 1")

    def stops_before_last_sum(self, spec: ModelSpec, plan: Plan) -> bool:
        """Whether a layer that is computed again lacks the sum over tensor-parallel ranks that ends it: with a norm
        behind that, or on a grid, what is summed is wanted."""
        return self.early_stop and spec.norm_order == "pre" and plan.grid is None

    def exposed_seconds(self, group: str, messages: float, products: float) -> float:
        """Seconds by which a group's `messages` (seconds) lengthen a step's `products` (seconds): exposed
        communication, and the slowdown of the products meanwhile."""
        overlapped = dict(self.overlap).get(group, 0.0) * messages
        return messages - overlapped + self.overlap_excess(overlapped, products)

    def overlap_excess(self, messages: float, products: float) -> float:
        """Seconds by which messages and products that begin together take longer than the products alone."""
        together = products * self.slowdown
        return messages - products if messages >= together else messages * (1 - 1 / self.slowdown)


TLLM = Execution()
