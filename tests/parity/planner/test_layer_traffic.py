"""One layer sends the bytes and messages of the planner's law, in every mode of tensor parallelism."""

from __future__ import annotations

import pytest

from benchmarks.comm.tensor_parallel import counted_layer, modes_of, spec_of
from tllm.planner.cost.messages.layer_traffic import layer_sent, layer_widths
from tllm.spec.grid.grid_shape import TensorMode

CASES = [(mode, ranks) for ranks in (4, 8, 9, 16) for mode in modes_of(ranks)]


@pytest.mark.parametrize(("mode", "ranks"), CASES)
@pytest.mark.parametrize("tokens", [288, 1152])
def test_a_layer_sends_what_the_law_says(mode: TensorMode, ranks: int, tokens: int) -> None:
    """Of short all-reduces, which send more bytes in fewer messages, and of long ones."""
    spec = spec_of(96)
    law = layer_sent(spec, mode, ranks, tokens)
    assert counted_layer(spec, mode, ranks, tokens) == (law.forward, law.backward)


@pytest.mark.parametrize("side", [2, 4, 8])
def test_a_square_sends_less_from_so_many_tokens_on(side: int) -> None:
    """T D > 3 P / (8 q - 2), but for the norms' sums of a number a token."""
    spec = spec_of(1024)
    bound = 3 * layer_widths(spec, side, spec.layers[0]).weights / (8 * side - 2) / spec.hidden_size

    def ratio(tokens: float) -> float:
        square, one_way = (layer_sent(spec, mode, side * side, int(tokens)) for mode in ("2d", "1d"))
        return (square.forward.bytes + square.backward.bytes) / (one_way.forward.bytes + one_way.backward.bytes)

    assert ratio(bound * 0.95) > 1 > ratio(bound * 1.05)
