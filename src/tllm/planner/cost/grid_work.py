"""What a rank of a grid holds and computes in training: its blocks of weights, its documents, its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tllm.planner.cost.activations import Microbatch
from tllm.planner.cost.rank_bytes import Parameter, part_of_width, run_parameters
from tllm.spec.cut import Cut
from tllm.spec.grid.dealt_documents import filled_blocks
from tllm.spec.grid.grid_shape import GridShape
from tllm.spec.model_spec import ModelSpec


def grid_microbatch(lengths: Sequence[int], item_bytes: int, shape: GridShape, place: int) -> Microbatch:
    """What a rank has of a microbatch of documents of these `lengths`. It makes logits of all of its tokens, as ranks
    multiply the same rows together."""
    own = filled_blocks(lengths, shape.token_blocks)[shape.inner_block(shape.place(place))]
    tokens = sum(own)
    return Microbatch(own, tokens, tokens, tokens, item_bytes, has_columns=True)


def hidden_part(spec: ModelSpec, shape: GridShape | None) -> ModelSpec:
    """The model with as many columns of hidden states as a rank has; where they are not even, the most that one has."""
    return spec if shape is None else replace(spec, hidden_size=-(-spec.hidden_size // shape.side))


def grid_parameters(
    spec: ModelSpec, layers: range, cut: Cut, shape: GridShape, place: int
) -> Iterator[list[Parameter]]:
    """As `run_parameters` has them: of matrices the rank's part of the width, and of vectors that are as long as the
    width (norms, biases) the columns of its hidden states."""
    matrices, vectors = part_of_width(spec, shape, place), hidden_part(spec, shape)
    vector = Parameter(matrices.hidden_size)
    units = zip(run_parameters(matrices, layers, cut), run_parameters(vectors, layers, cut), strict=True)
    for in_blocks, in_columns in units:
        yield [b if a == vector else a for a, b in zip(in_blocks, in_columns, strict=True)]
