"""A batch that is served sends the bytes and messages of the planner's law, on every grid and without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.comm.tensor_parallel import counted_batch, modes_of, spec_of
from tests.support.selection import soak_but
from tllm.planner.cost.tensor_parallel.serving_traffic import StageSums
from tllm.spec.families import spec_from_config
from tllm.spec.grid.grid_shape import TensorMode, grid_shape
from tllm.spec.model_spec import ModelSpec

CASES = [(mode, ranks) for ranks in (4, 8, 9, 12, 16) for mode in modes_of(ranks)]


def sums_of(spec: ModelSpec, mode: TensorMode, ranks: int) -> StageSums:
    return StageSums(spec, grid_shape(mode, ranks), ranks)


@pytest.mark.parametrize(("mode", "ranks"), soak_but(CASES[:5], CASES))
def test_a_batch_sends_what_the_law_says(mode: TensorMode, ranks: int) -> None:
    """One row, fewer and more rows than squares, and prompts whose sums are short and long."""
    spec = spec_of(96)
    for tokens, rows in ((1, 1), (3, 3), (48, 1), (1152, 2)):
        law = sums_of(spec, mode, ranks).sent(range(spec.num_layers), tokens, rows, 4)
        assert counted_batch(spec, mode, ranks, tokens, rows) == law, (tokens, rows)


@pytest.mark.parametrize(("mode", "ranks"), CASES[:5])
def test_a_stage_that_hands_on_does_too(mode: TensorMode, ranks: int) -> None:
    spec = spec_of(96)
    for tokens in (1, 144):
        law = sums_of(spec, mode, ranks).sent(range(2), tokens, 1, 4)
        assert counted_batch(spec, mode, ranks, tokens, 1, range(2)) == law, tokens


def test_squares_whose_tokens_see_those_after_them_send_each_other_nothing() -> None:
    spec = replace(spec_of(96), bidirectional=True)
    for layers in (range(3), range(2)):
        law = sums_of(spec, "2.5d", 8).sent(layers, 48, 1, 4)
        assert counted_batch(spec, "2.5d", 8, 48, 1, layers if len(layers) < 3 else None) == law


def test_widths_that_no_side_divides_are_counted_as_they_are() -> None:
    """35 columns of hidden states, 5 heads of one key-value head, norms of all heads."""
    fields = dict(model_type="olmo2", architectures=["Olmo2ForCausalLM"], hidden_size=35, intermediate_size=53)
    fields |= dict(num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=5, head_dim=6, vocab_size=101)
    fields |= dict(rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=4096)
    spec = spec_from_config(fields)
    for mode, ranks in (("2d", 4), ("3d", 8), ("2.5d", 8)):
        law = sums_of(spec, mode, ranks).sent(range(3), 21, 3, 4)
        assert counted_batch(spec, mode, ranks, 21, 3) == law, mode


def test_for_few_tokens_a_grid_sends_less_and_for_many_more() -> None:
    """Short sums go to every other rank, of which a row has fewer; long ones send a wide MLP's columns."""
    spec = spec_of(576)
    for mode, ranks in (("2d", 4), ("2d", 9), ("2d", 16)):
        few, many = (
            [sums_of(spec, way, ranks).of_one_layer(spec.layers[1], tokens, 4).bytes for way in (mode, "1d")]
            for tokens in (1, 2304)
        )
        assert few[0] < few[1], (mode, ranks)
        assert many[0] > 0.9 * many[1], (mode, ranks)
