"""The states of running sequences, in layers that have those in place of keys and values; how a batch advances them.

Each running sequence has a slot, the same in all layers and on all ranks, which the scheduler gives it. A slot holds
what the sequence's tokens came to when its last batch was computed. A sequence that begins finds zeros there, whoever
had the slot before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tllm.core.errors import CapacityError
from tllm.engine.schedule.batch import BatchEntry
from tllm.model.recurrence import Advance, Run, State, StateShape, of_run


class RecurrentStates:
    """Tensors [slots, ...] for each layer here that has a state, float32 at least. CapacityError without memory."""

    def __init__(self, shapes: Mapping[int, StateShape], slots: int, dtype: torch.dtype) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert slots or not shapes, "each running sequence needs a slot for its state"
        self.layers = {n: tuple(_zeros((slots, *shape), wide) for shape in of_layer) for n, of_layer in shapes.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for state in self.layers.values() for tensor in state)


class StateRuns:
    """One batch: the states of its entries' slots go over their rows. Single tokens, which come first, go together."""

    def __init__(self, states: RecurrentStates, entries: tuple[BatchEntry, ...]) -> None:
        self.states = states
        singles = next((i for i, entry in enumerate(entries) if entry.count > 1), len(entries))
        groups = [entries[:singles]] if singles else []
        groups += [(entry,) for entry in entries[singles:]]
        self.runs = [_SlotRun(group) for group in groups]
        self.sizes = [count * length for count, length in (run.run for run in self.runs)]

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Each entry's state over its rows, to the state that its slot then holds."""
        held = self.states.layers[layer]
        outs = []
        for run, *part in zip(self.runs, *(torch.split(x, self.sizes) for x in rows), strict=True):
            out, state = advance(run.read(held), *(of_run(x, run.run) for x in part))
            run.write(held, state)
            outs.append(out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _SlotRun:
    """Entries with as many rows each."""

    def __init__(self, entries: tuple[BatchEntry, ...]) -> None:
        self.run: Run = (len(entries), entries[0].count)
        self.slots = torch.tensor([entry.state_slot for entry in entries])
        self.begins = torch.tensor([i for i, entry in enumerate(entries) if entry.start == 0], dtype=torch.int64)

    def read(self, held: State) -> State | None:
        """The states before these rows; None where all sequences begin here."""
        if len(self.begins) == len(self.slots):
            return None
        state = tuple(tensor.index_select(0, self.slots) for tensor in held)
        return tuple(tensor.index_fill_(0, self.begins, 0.0) for tensor in state) if len(self.begins) else state

    def write(self, held: State, state: State) -> None:
        for tensor, new in zip(held, state, strict=True):
            tensor.index_copy_(0, self.slots, new.to(tensor.dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        # torch.zeros would leave the memory to be found later, page by page.
        return torch.empty(shape, dtype=dtype).zero_()
    except RuntimeError as error:
        wanted = math.prod(shape) * dtype.itemsize
        raise CapacityError(
            f"no memory for {wanted / 2**20:.0f} MiB of states ({shape[0]} sequences of one layer)",
            "let fewer sequences run at once (--max-num-seqs)",
        ) from error
