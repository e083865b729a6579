"""`StageModel`: what a stage of the ring needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tllm.model.attention import Attend
from tllm.parallel.linear import Adapt, unadapted


class StageModel(Protocol):
    """What a stage needs of `model.Transformer`.

    `received_width`: numbers of a token that come from the stage before. `scales_by_length`: its rope goes by the
    length of a sequence.
    """

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def received_width(self) -> int: ...

    @property
    def scales_by_length(self) -> bool: ...

    def __call__(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lengths_T: Tensor | None = None,
        adapt: Adapt = unadapted,
        ids_T: Tensor | None = None,
    ) -> Tensor: ...

    def logits(self, x_TD: Tensor) -> Tensor: ...
