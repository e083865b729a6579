"""The states of running sequences in layers that have a state in place of keys and values, and how a batch advances
them.

Each running sequence has a slot, the same in all layers and on all ranks, which the scheduler gives it. A slot holds
what the sequence's tokens came to when its last batch was computed. A sequence that begins finds zeros there, whoever
had the slot before.

Draft tokens may be wrong, and a state cannot be taken back. So rows with draft tokens leave the state as it was and are
kept beside it. The sequence's next batch begins where the accepted ones end: these are taken in then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tllm.core.errors import CapacityError
from tllm.devices.choose import CPU
from tllm.engine.compute.positions import num_singles
from tllm.engine.schedule.batch import BatchEntry
from tllm.model.recurrence import Advance, State, StateShape, of_run


class RecurrentStates:
    """Tensors [slots, ...] for each layer here that has a state, float32 at least. CapacityError without memory."""

    def __init__(
        self, shapes: Mapping[int, StateShape], slots: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert slots or not shapes, "each running sequence needs a slot for its state"
        self.device = device
        self.layers = {
            n: tuple(_states((slots, *shape), wide, device) for shape in of_layer) for n, of_layer in shapes.items()
        }

        self.drafted_at: dict[int, int] = {}
        """The position of the first row that is kept for a slot."""
        self.drafted: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """The rows that are kept, [T, ...], by layer and slot."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for state in self.layers.values() for tensor in state)


class StateRuns:
    """One batch: the states of its entries' slots go over their rows. Single tokens, which come first, go together."""

    def __init__(self, states: RecurrentStates, entries: tuple[BatchEntry, ...]) -> None:
        self.states = states
        begins = [entry.state_slot for entry in entries if entry.start == 0]
        self.begins = torch.tensor(begins, dtype=torch.int64).to(states.device)
        self.accepted = _accepted(states, entries)
        singles = num_singles(entries)
        of = partial(_SlotRun, states.device)
        self.runs = [of(entries[:singles], 1)] if singles else []
        self.runs += [of((entry,), entry.count, entry.num_draft_tokens > 0) for entry in entries[singles:]]
        self.sizes = [len(run.numbers) * run.count for run in self.runs]

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Each entry's state over its rows, to the state that its slot then holds."""
        held = self.states.layers[layer]
        for tensor in held:
            tensor.index_fill_(0, self.begins, 0.0)
        for run in self.accepted:
            kept = [self.states.drafted[layer, slot] for slot in run.numbers]
            rows_B = (torch.stack([x[: run.count] for x in same]) for same in zip(*kept, strict=True))
            run.write(held, advance(run.read(held), *rows_B)[1])
        outs = []
        for run, *part in zip(self.runs, *(torch.split(x, self.sizes) for x in rows), strict=True):
            out, state = advance(run.read(held), *(of_run(x, (len(run.numbers), run.count)) for x in part))
            outs.append(out.flatten(0, 1))
            if run.has_drafts:
                self.states.drafted[layer, run.numbers[0]] = tuple(x.clone() for x in part)
            else:
                run.write(held, state)
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _SlotRun:
    """The slots of some sequences that have `count` rows each."""

    def __init__(
        self, device: torch.device, entries: Sequence[BatchEntry], count: int, has_drafts: bool = False
    ) -> None:
        self.numbers = [entry.state_slot for entry in entries]  # on the host, where layer after layer asks for them
        self.slots = torch.tensor(self.numbers).to(device)
        self.count, self.has_drafts = count, has_drafts

    def read(self, held: State) -> State:
        """The states before these rows."""
        return tuple(tensor.index_select(0, self.slots) for tensor in held)

    def write(self, held: State, state: State) -> None:
        for tensor, new in zip(held, state, strict=True):
            tensor.index_copy_(0, self.slots, new)


def _accepted(states: RecurrentStates, entries: tuple[BatchEntry, ...]) -> list[_SlotRun]:
    """The kept rows that have come true, for entries with as many together; notes which entries keep rows now."""
    by_count: dict[int, list[BatchEntry]] = {}
    for entry in entries:
        at = states.drafted_at.pop(entry.state_slot, entry.start)
        if entry.start > at:
            by_count.setdefault(entry.start - at, []).append(entry)
        if entry.num_draft_tokens:
            states.drafted_at[entry.state_slot] = entry.start
    return [_SlotRun(states.device, same, count) for count, same in by_count.items()]


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, hint: str) -> Tensor:
    """Memory that is written once, so that a lack of it shows now: CapacityError, which says for `what`."""
    try:
        # torch.zeros would leave the memory to be found later, page by page.
        return torch.empty(shape, dtype=dtype, device=device).zero_()
    except RuntimeError as error:
        wanted = math.prod(shape) * dtype.itemsize
        raise CapacityError(f"no memory for {wanted / 2**20:.0f} MiB of {what}", hint) from error


def _states(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    what = f"states ({shape[0]} sequences of one layer)"
    return zeroed(shape, dtype, device, what, "let fewer sequences run at once (--max-num-seqs)")
