"""What the ranks of a stage send each other for one batch that is served: 1D, and grids whose weights stay in place.

Without the batch itself and the hidden states that come from the stage before, which its leader sends to all its ranks.
For T tokens of D, products into widths A (queries, keys and values; gate and up) and out of widths B (heads; the MLP),
both over all columns of a grid of n ranks, side q and p parts of D (q, or q q on a cube), a dense layer sums

    1d      2 times T D over n ranks
    grid    T A once in parts: T A_j over the p ranks of each column j
            2 times T D in parts: T D_i over the q ranks of each row i
            2 times T over the p ranks of each column, for norms

and with d squares (2.5d) each square has its T / d tokens, and sends their keys and values to the others. A batch of
fewer tokens than squares is not divided, nor one of a model whose tokens see those after them. An all-reduce of a short
message sends (n - 1) times it from each rank, which is why a grid sends fewer bytes than 1d for few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tllm.planner.cost.messages.collective_bytes import all_reduce, one_shot_limit
from tllm.planner.cost.messages.layer_traffic import Sent
from tllm.spec.cut import as_layer, cut_stage, projected_width, size, width_of
from tllm.spec.grid.grid_shape import GridPlace, GridShape
from tllm.spec.model_spec import LayerSpec, ModelSpec

BEST_BYTES = 16
"""Of the likeliest token of a row, and its logit, as a rank sends them to the one that samples."""


class GroupSums(NamedTuple):
    """An all-reduce in each of some groups of `ranks`, which work at the same time.

    `elements` are those of each group. `is_wide`: they are in float32 at least.
    """

    ranks: int
    elements: tuple[int, ...]
    is_wide: bool = False

    def sent(self, item: int) -> Sent:
        """By all ranks, at `item` bytes an element."""
        item, n = max(item, 4) if self.is_wide else item, self.ranks
        total = Sent()
        for elements in self.elements:
            rounds = 1 if elements * item <= one_shot_limit(n) else 2
            nbytes = sum(all_reduce(elements, item, rank, n) for rank in range(n))
            total = total.plus(Sent(nbytes, rounds * n * (n - 1)))
        return total if n > 1 else Sent()


class StageSums:
    """What the ranks of a stage sum, and exchange else, for batches. `shape` is their grid, None where they cut one
    way."""

    def __init__(self, spec: ModelSpec, shape: GridShape | None, ranks: int) -> None:
        self.spec, self.shape, self.ranks = spec, shape, ranks
        self.cuts = cut_stage(spec, (1,) * (ranks if shape is None else shape.side))

    def squares(self, tokens: int) -> list[int]:
        """The tokens of each square of a 2.5D grid; of other stages all at once."""
        if self.shape is None or self.shape.mode != "2.5d":
            return [tokens]
        depth = self.shape.depth
        if tokens < depth or self.spec.bidirectional:
            return [tokens] * depth
        return [tokens * (at + 1) // depth - tokens * at // depth for at in range(depth)]

    def of_layer(self, layer: LayerSpec, tokens: int) -> list[GroupSums]:
        """The all-reduces of one dense layer, in order."""
        spec, D = self.spec, self.spec.hidden_size
        squares = [GroupSums(self._heads, (tokens,) * self._parts, True)] * 2 if spec.qk_norm == "full" else []
        if self.shape is None:
            return [*squares, *[GroupSums(self.ranks, (tokens * D,))] * layer.hidden_sums]
        projected = [projected_width(spec, layer, cut) for cut in self.cuts]
        wide = [spec.into_mlp * size(as_layer(spec, layer, cut)[1].width) for cut in self.cuts]
        norms = 4 if spec.norm_order == "both" else 2
        into = [GroupSums(self.shape.width_parts, tuple(of_token)) for of_token in (projected, wide)]
        out = GroupSums(self.shape.side, tuple(self._widths()))
        norm = GroupSums(self.shape.width_parts, (1,) * self.shape.side, is_wide=True)
        squares = [one._replace(elements=(1,) * self._parts) for one in squares]
        return [self._for(tokens, one) for one in (*into, out, out, *[norm] * norms, *squares)]

    def of_ends(self, tokens: int, rows: int, first: bool, last: bool) -> list[GroupSums]:
        """Those of the embedding, if the `first` layer is here, and for logits of some rows, if the `last` is."""
        D, vocab = self.spec.hidden_size, [size(cut.vocab) for cut in self.cuts]
        if self.shape is None:
            return [GroupSums(self.ranks, (tokens * D,))] * first
        norm = GroupSums(self.shape.width_parts, (1,) * len(vocab), is_wide=True)
        logits = GroupSums(self.shape.width_parts, tuple(vocab))
        of_rows = [self._all_rows(rows, one) for one in (norm, logits)] if last else []
        return [*[self._for(tokens, GroupSums(self.shape.side, tuple(self._widths())))] * first, *of_rows]

    def keys(self, layer: LayerSpec, tokens: int, item: int) -> Sent:
        """Keys and values that the squares of a 2.5D grid send each other."""
        squares = self.squares(tokens)
        if self.shape is None or sum(squares) != tokens or len(squares) == 1:
            return Sent()
        depth, side = self.shape.depth, self.shape.side
        held = [size(as_layer(self.spec, layer, cut)[1].kv_heads) for cut in self.cuts]
        elements = tokens * 2 * sum(held) * as_layer(self.spec, layer, self.cuts[0])[0].head_dim
        return Sent((depth - 1) * side * elements * item, depth * (depth - 1) * side * side)

    def of_one_layer(self, layer: LayerSpec, tokens: int, item: int) -> Sent:
        """Bytes and messages of all ranks in one layer."""
        total = self.keys(layer, tokens, item)
        for one in self.of_layer(layer, tokens):
            total = total.plus(one.sent(item))
        return total

    def sent(self, layers: range, tokens: int, rows: int, item: int) -> Sent:
        """Bytes and messages of all ranks for a batch of `tokens`, of which `rows` get a token, the likeliest one."""
        first, last = layers.start == 0, layers.stop == self.spec.num_layers
        total = Sent()
        for one in self.of_ends(tokens, rows, first, last):
            total = total.plus(one.sent(item))
        for number in layers:
            total = total.plus(self.of_one_layer(self.spec.layers[number], tokens, item))
        return total.plus(self._sampled(tokens, rows, item) if last else self._hands_on(tokens, item))

    def _sampled(self, tokens: int, rows: int, item: int) -> Sent:
        """The likeliest tokens to the rank that leads; before that the rows of all squares to each other."""
        others = (self.ranks if self.shape is None else self.shape.side) - 1
        best = Sent(others * rows * BEST_BYTES, others)
        return best if self.shape is None else best.plus(self._between_squares(tokens, item), self.shape.side)

    def _hands_on(self, tokens: int, item: int) -> Sent:
        """What comes to the leader of a stage that is not the last: its column puts columns and rows together."""
        if self.shape is None:
            return Sent()
        parts, squares = self.shape.width_parts, len(self.squares(tokens))
        whole = Sent(
            (parts - 1) * sum(self.squares(tokens)) * self.spec.hidden_size * item, squares * parts * (parts - 1)
        )
        rows = self._between_squares(tokens, item)
        return whole.plus(rows._replace(bytes=self.shape.side * rows.bytes))

    def _between_squares(self, tokens: int, item: int) -> Sent:
        """Hidden states of all rows, to the other squares, from as many ranks of a square as have all columns."""
        squares, D = self.squares(tokens), self.spec.hidden_size
        if self.shape is None or len(squares) == 1 or sum(squares) != tokens:
            return Sent()
        depth = self.shape.depth
        return Sent((depth - 1) * tokens * D * item, depth * (depth - 1) * self.shape.side)

    @property
    def _heads(self) -> int:
        """Ranks that have different heads of the same tokens."""
        return self.ranks if self.shape is None else self.shape.side

    @property
    def _parts(self) -> int:
        """How many groups of these a stage or a square has."""
        return 1 if self.shape is None else self.shape.width_parts

    def _widths(self) -> Iterator[int]:
        """The columns of hidden states of each row of one square, or of the cube."""
        assert self.shape is not None
        layers = range(self.shape.side) if self.shape.mode == "3d" else range(1)
        for layer in layers:
            for row in range(self.shape.side):
                place = self.shape.rank_at(*GridPlace(layer, row, 0))
                yield size(width_of(self.spec.hidden_size, self.shape, place))

    def _for(self, tokens: int, of_token: GroupSums) -> GroupSums:
        """For the tokens of each square, given what one token takes in one square."""
        return of_token._replace(
            elements=tuple(held * elements for held in self.squares(tokens) for elements in of_token.elements)
        )

    def _all_rows(self, rows: int, of_token: GroupSums) -> GroupSums:
        """Where every square has all rows."""
        return of_token._replace(
            elements=tuple(rows * elements for _ in self.squares(rows) for elements in of_token.elements)
        )
