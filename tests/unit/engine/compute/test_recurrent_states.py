"""States in slots: each sequence goes on from its own, whatever else is in a batch; wrong drafts leave nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.engine.compute.recurrent_states import RecurrentStates, StateRuns
from tllm.engine.schedule.batch import PLAIN_GREEDY, BatchEntry
from tllm.model.recurrence import State

LAYERS = (2, 5)


def advance(state: State | None, *rows: Tensor) -> tuple[Tensor, State]:
    """The sum of all tokens so far."""
    assert state is not None
    sums_BT = state[0] + rows[0].cumsum(1)
    return sums_BT, (sums_BT[:, -1:],)


class Sequences:
    """Batches over states that are sums, so that what a row gives tells which rows came before it."""

    def __init__(self, slots: int = 3) -> None:
        self.states = RecurrentStates(dict.fromkeys(LAYERS, ((1,),)), slots, torch.float32)

    def batch(self, *parts: tuple[int, int, list[float], int]) -> list[list[float]]:
        """For (slot, start, tokens, how many of them are drafts) of each entry, what each of its tokens gives."""
        entries = tuple(
            BatchEntry(slot, start, len(x), 9, ((0, 9),), PLAIN_GREEDY, num_draft_tokens=drafts, state_slot=slot)
            for slot, start, x, drafts in parts
        )
        runs, x_T = StateRuns(self.states, entries), torch.tensor([token for part in parts for token in part[2]])
        outs = [runs.recur(layer, advance, x_T) for layer in LAYERS]
        assert torch.equal(outs[0], outs[1])
        return [out.tolist() for out in outs[0].split([len(part[2]) for part in parts])]


def test_each_sequence_goes_on_from_its_own_state() -> None:
    them = Sequences()
    assert them.batch((2, 0, [1, 2], 0), (0, 0, [10, 20, 30], 0)) == [[1, 3], [10, 30, 60]]
    assert them.batch((0, 3, [40], 0), (1, 0, [500], 0), (2, 2, [3, 4], 0)) == [[100], [500], [6, 10]]
    assert them.batch((1, 1, [1], 0), (2, 4, [5], 0), (0, 4, [50], 0)) == [[501], [15], [150]]


def test_whoever_begins_finds_zeros() -> None:
    them = Sequences()
    them.batch((0, 0, [7], 0), (1, 0, [8, 9], 0))
    assert them.batch((0, 0, [1], 0), (1, 2, [3], 0)) == [[1], [20]]
    assert them.batch((1, 0, [4, 5], 0)) == [[4, 9]]


def test_only_accepted_drafts_come_into_the_state() -> None:
    them = Sequences()
    them.batch((0, 0, [1, 2], 0), (1, 0, [100], 0), (2, 0, [1000], 0))
    assert them.batch((2, 1, [1], 0), (0, 2, [3, 4, 5], 2), (1, 1, [1, 2, 3], 2)) == [
        [1001],
        [6, 10, 15],
        [101, 103, 106],
    ]
    # Of the first one draft token was right, of the second both.
    assert them.batch((0, 4, [6, 7], 1), (1, 4, [4], 0)) == [[16, 23], [110]]
    # Now none was; and the third has gone on meanwhile.
    assert them.batch((0, 5, [8], 0), (2, 2, [2], 0)) == [[24], [1003]]


def test_drafts_of_one_that_is_gone_are_gone() -> None:
    them = Sequences()
    them.batch((0, 0, [1], 0))
    them.batch((0, 1, [2, 3], 1))
    assert them.batch((0, 0, [5, 6, 7], 0)) == [[5, 11, 18]]
    assert them.batch((0, 3, [8], 0)) == [[26]]
