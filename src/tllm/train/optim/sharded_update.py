"""`OptimizerUpdate`: how one rank's weights follow their gradients, all of them or a range of each bucket (1910.02054).

With Ψ parameters of b bytes on each rank, n dp ranks and S bytes of optimizer state a parameter (8 for AdamW, 4 for
SGD; 4 more for the float32 weights of 16-bit ones), a rank holds between steps, to an element a bucket:

    zero 0   Ψ (b + 4 + S)        zero 1   Ψ (b + 4 + S / n)
    zero 2   Ψ (b + (4 + S) / n)  zero 3   Ψ (b + 4 + S) / n

S is at the host or on a disk instead where a `StatePlacement` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from tllm.train.gradients.gradient_buckets import GradientBuckets
from tllm.train.optim.flat_parameters import FlatParameters
from tllm.train.optim.optimizer import Optimizer
from tllm.train.state.optimizer_offload import OnDevice, StatePlacement
from tllm.train.state.tensor_blocks import StateSlice, TensorBlock, optimizer_blocks, wide

WIDE = "float32"
"""The state's name of the weights as they are updated, where the model's own are narrower."""


class OptimizerUpdate:
    """Takes the gradients of `buckets` into the weights. Parameters become views of runs of memory made here.

    Weight decay is for the buckets that say so. Every rank has the same new weights to the bit, however they are cut
    and wherever the optimizer's states lie; these are wanted one bucket at a time.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        optimizer: Optimizer,
        weight_decay: float = 0.0,
        place: StatePlacement | None = None,
    ) -> None:
        self.buckets, self.optimizer, self.weight_decay = buckets, optimizer, weight_decay
        self.runs = FlatParameters(buckets)
        place = place or OnDevice()
        self.kept = [
            place.keep(self._states(mine), mine.numel(), wide(mine.dtype), mine.device) for mine in self.runs.mine
        ]
        self.take_weights()

    def apply(self, step: int, rate: float) -> None:
        """The weights after step `step`, counted from 1, on every rank of a bucket's group."""
        for number, (bucket, mine) in enumerate(zip(self.buckets.buckets, self.runs.mine, strict=True)):
            decay = self.weight_decay if bucket.decays else 0.0
            with self.kept[number] as state:
                own = state.get(WIDE, mine)
                self.optimizer.update(own, self.buckets.held(number), state, step, rate, decay)
                if own is not mine:
                    mine.copy_(own)
            if self.buckets.zero and not self.runs.is_spread(number):
                self.runs.gather(number)

    def held(self) -> Iterator[StateSlice]:
        """Every tensor of this rank beside the model's weights that a save must keep, parameter by parameter."""
        for number, kept in enumerate(self.kept):
            for parameter, start, place in self.runs.spans(number):
                for name, tensor in kept.tensors.items():
                    yield StateSlice(parameter, name, start, tensor[place])

    def blocks(self) -> list[TensorBlock]:
        """All that this rank must save: weights and states. Views, so that filling them fills their owners."""
        return self.runs.blocks() + optimizer_blocks(self.held())

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        """Begin from values that `fill` gives to the parameters of one module after another; see
        `FlatParameters.fill`."""
        self.runs.fill(fill)
        self.take_weights()

    def take_weights(self) -> None:
        """Begin from the model's weights as they are now, after they were filled from a folder without this state."""
        for kept, mine in zip(self.kept, self.runs.mine, strict=True):
            if WIDE in kept.tensors:
                with kept as state:
                    state[WIDE].copy_(mine)

    @property
    def nbytes(self) -> int:
        """Room of the optimizer's states and of wide weights beside the model's own, wherever they lie."""
        return sum(tensor.nbytes for kept in self.kept for tensor in kept.tensors.values())

    def close(self) -> None:
        """Give back the room of the states."""
        self.kept.clear()

    def _states(self, mine: Tensor) -> list[str]:
        """The names of what is kept of a bucket."""
        return [*self.optimizer.states, *([WIDE] if wide(mine.dtype) != mine.dtype else [])]
