"""`Execution`: what of a trainer's own ways changes how long a step takes on given machines; as it stands, tllm's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tllm.ground.errors import ConfigError

GROUPS = ("tp", "cp", "ep", "dp", "edp", "replica")


@dataclass(frozen=True)
class Execution:
    """How a step is done.

    `collectives`: each rank sends to each other ("flat"), or inside nodes first ("levels"). `beside`: of a group's
    messages the share that travels while products are computed, where tllm waits for them; `slowdown`: how many times
    longer products take meanwhile, as both use the device (Galvatron, 2211.13878, section 3.4). `touches`: how often
    elementwise operations move, forward and backward, what a layer keeps: 5 where neighbours are fused (written and
    read forward; read, and its gradient written and read, backward), more where each operation goes through memory.
    `attention`: of the device's rate for scores what the kernel reaches. `again`: the share of a layer's forward pass
    that is worked out a second time, where a trainer does that otherwise than the plan.
    """

    collectives: Literal["flat", "levels"] = "flat"
    beside: tuple[tuple[str, float], ...] = ()
    slowdown: float = 1.0
    touches: float = 5.0
    attention: float = 1.0
    again: float | None = None

    def __post_init__(self) -> None:
        for group, share in self.beside:
            if group not in GROUPS or not 0 <= share <= 1:
                raise ConfigError(
                    f"beside of [execution] has {group} = {share:g}", f"give shares of 0 to 1 of {', '.join(GROUPS)}"
                )
        if not self.slowdown >= 1:
            raise ConfigError(f"slowdown of [execution] is {self.slowdown:g}", "give 1 or more: products never gain")
        if not self.touches >= 0:
            raise ConfigError(f"touches of [execution] is {self.touches:g}", "give 0 or more")
        if not 0 < self.attention <= 1:
            raise ConfigError(f"attention of [execution] is {self.attention:g}", "give a share above 0 and up to 1")
        if self.again is not None and not 0 <= self.again <= 1:
            raise ConfigError(f"again of [execution] is {self.again:g}", "give a share of 0 to 1")

    def waited(self, group: str, messages: float, products: float) -> float:
        """Seconds that messages add to products: what is not beside them, and how much they slow them down."""
        beside = dict(self.beside).get(group, 0.0) * messages
        return messages - beside + self.outlast(beside, products)

    def outlast(self, messages: float, products: float) -> float:
        """Seconds by which both together, begun at once, take longer than the products alone."""
        together = products * self.slowdown
        return messages - products if messages >= together else messages * (1 - 1 / self.slowdown)


TLLM = Execution()
