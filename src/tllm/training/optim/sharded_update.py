"""`OptimizerUpdate`: the optimizer step of one rank, on all weights or on its range of each bucket (ZeRO, 1910.02054).

With Ψ parameters of b bytes on each rank, n dp ranks and S bytes of optimizer state a parameter (8 for AdamW, 4 for
SGD; 4 more for the float32 weights of 16-bit ones), a rank holds between steps, to an element a bucket:

    zero 0   Ψ (b + 4 + S)        zero 1   Ψ (b + 4 + S / n)
    zero 2   Ψ (b + (4 + S) / n)  zero 3   Ψ (b + 4 + S) / n

S is at the host or on a disk instead where a `StatePlacement` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.optim.flat_parameters import FlatParameters, memory_layout
from tllm.training.optim.optimizer import Optimizer
from tllm.training.state.optimizer_offload import OnDevice, StatePlacement, in_memory
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock, optimizer_blocks, update_dtype
from tllm.training.state.train_state import FlatMemory

FLOAT32_WEIGHTS = "float32"
"""The state's name of the float32 weights that the optimizer updates, where the model's own have 16 bits."""


class OptimizerUpdate:
    """Updates the weights by the gradients of `buckets`. Parameters become views of flat tensors that are made here.

    Weight decay applies to the buckets that say so. Every rank has the same new weights to the bit, however they are
    cut and wherever the optimizer's states lie; `states[number]` are those of a bucket, used one bucket at a time.
    `memory` is that of both, and counts the updates that have begun: what is `kept` of a part that was laid out the
    same, with the values that it has, or new.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        optimizer: Optimizer,
        weight_decay: float = 0.0,
        place: StatePlacement | None = None,
        kept: FlatMemory | None = None,
    ) -> None:
        self.buckets, self.optimizer, self.weight_decay = buckets, optimizer, weight_decay
        layout = memory_layout(buckets.layout, optimizer.states)
        if kept is not None and kept.fits(layout):
            self.memory, self.flat = kept, FlatParameters(buckets.layout, kept.weights)
            self.states = [in_memory(tensors) for tensors in kept.states]
            return
        self.flat = FlatParameters(buckets.layout)
        place = place or OnDevice()
        self.states = [
            place.keep(self._state_names(mine), mine.numel(), update_dtype(mine.dtype), mine.device)
            for mine in self.flat.mine
        ]
        self.memory = FlatMemory(layout, self.flat.whole, [states.tensors for states in self.states])
        self.take_weights()

    def apply(self, step: int, learning_rate: float) -> None:
        """The weights after step `step`, counted from 1, on every rank of a bucket's group."""
        self.memory.begun += 1
        for number, (bucket, mine) in enumerate(zip(self.buckets.layout.buckets, self.flat.mine, strict=True)):
            weight_decay = self.weight_decay if bucket.decays else 0.0
            with self.states[number] as state:
                weights = state.get(FLOAT32_WEIGHTS, mine)
                self.optimizer.update(weights, self.buckets.reduced(number), state, step, learning_rate, weight_decay)
                if weights is not mine:
                    mine.copy_(weights)
            if self.buckets.layout.zero and not self.flat.is_sharded(number):
                self.flat.gather(number)

    def state_slices(self) -> Iterator[StateSlice]:
        """Every tensor of this rank beside the model's weights that a save must keep, parameter by parameter."""
        for number, states in enumerate(self.states):
            for parameter, start, place in self.buckets.layout.spans(number):
                for name, tensor in states.tensors.items():
                    yield StateSlice(parameter, name, start, tensor[place])

    def blocks(self) -> list[TensorBlock]:
        """All that this rank must save: weights and states. Views, so that filling them fills their owners."""
        return self.flat.blocks() + optimizer_blocks(self.state_slices())

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        """Begin from values that `fill` gives to the parameters of one module after another; see
        `FlatParameters.fill`."""
        self.memory.begun += 1
        self.flat.fill(fill)
        self.take_weights()

    def take_weights(self) -> None:
        """Begin from the model's weights as they are now, after they were filled from a folder without this state."""
        for states, mine in zip(self.states, self.flat.mine, strict=True):
            if FLOAT32_WEIGHTS in states.tensors:
                with states as state:
                    state[FLOAT32_WEIGHTS].copy_(mine)

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer's states and of float32 weights beside the model's own, wherever they lie."""
        return sum(tensor.nbytes for states in self.states for tensor in states.tensors.values())

    def close(self) -> None:
        """Give back the room of the states, but for what somebody else keeps of the memory."""
        self.states.clear()
        self.memory = FlatMemory(None)

    def _state_names(self, mine: Tensor) -> list[str]:
        """The names of what is kept of a bucket."""
        return [*self.optimizer.states, *([FLOAT32_WEIGHTS] if update_dtype(mine.dtype) != mine.dtype else [])]
