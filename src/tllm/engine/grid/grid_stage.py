"""What a stage of the ring is made of on a grid of ranks: its model, and who samples.

To the stages before and after a grid is one stage like any other: whole hidden states come to its leader and leave from
there. Inside a rank has its part of their columns, and on a grid of several squares some of the batch's rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tllm.comm.collectives.group import solo
from tllm.engine.compute.adapted_rows import AdaptedRows
from tllm.engine.compute.logprobs import take_rows
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.sampler import Sampler, pieces_of
from tllm.engine.grid.divided_tokens import DividedRows
from tllm.engine.schedule.batch import Batch, Results
from tllm.model.attention import Attend
from tllm.model.transformer import Transformer
from tllm.parallel.collectives import gathered
from tllm.parallel.grid.grid_mesh import StationaryMesh
from tllm.parallel.linear import Adapt, unadapted
from tllm.spec.cut import size, width_of


class GridModel:
    """A rank's model as `PipelineStage` calls it, with whole batches (`StageModel`).

    After layers that are the last it gives all rows of this rank's columns, from which all ranks make logits. After
    others it gives whole hidden states on the stage's leader; what other ranks give is not used.
    """

    def __init__(self, model: Transformer, mesh: StationaryMesh) -> None:
        self.model, self.grid = model, mesh.grid
        # A token that sees those after it needs the rows of other squares, so that each square computes all of them.
        self.copies = solo() if model.spec.bidirectional else mesh.copies
        self.is_first, self.is_last = model.is_first, model.is_last
        self.received_width, self.scales_by_length = model.received_width, model.scales_by_length
        width = model.spec.hidden_size
        self._columns = slice(*self.grid.weight_range(width))
        self._widths = [size(width_of(width, self.grid.shape, rank)) for rank in self.grid.width_ranks]

    def __call__(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lengths_T: Tensor | None = None,
        adapt: Adapt = unadapted,
        ids_T: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(attend, PagedAttend), "pages are written for all rows of a batch"
        rows = DividedRows(len(positions_T), self.copies)
        own = rows.own
        x = x[own] if self.is_first else x[own, self._columns]
        if isinstance(adapt, AdaptedRows):
            adapt = adapt.of_rows(own)
        lengths_T = None if lengths_T is None else lengths_T[own]
        x_TD = self.model(x, positions_T[own], rows.attend(attend), lengths_T, adapt)
        if self.is_last:
            return rows.put_together(x_TD)
        # The leader's column of the grid has all that it sends on.
        return rows.put_together(self._whole(x_TD)) if self.grid.at.column == 0 else x_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary; all ranks with other columns of the same rows call it."""
        return self.model.logits(x_TD)

    def normed(self, x_TD: Tensor) -> Tensor:
        """Whole rows after the final norm; all ranks call it."""
        return self._whole(self.model.normed(x_TD))

    def _whole(self, x_TD: Tensor) -> Tensor:
        return gathered(x_TD, self.grid.width, self._widths, dim=1)


class FollowingSampler(Sampler):
    """On ranks whose row of the grid does not sample: it does its part of the logits, and no more."""

    def __call__(self, x_TD: Tensor, batch: Batch) -> Results | None:
        super().__call__(x_TD, batch)
        return None

    def _argmax(self, x_RD: Tensor) -> list[int]:
        self.logits(x_RD)
        return []

    def whole_logits(self, x_TD: Tensor, rows: list[int]) -> Iterator[Tensor]:
        """None, once all are made."""
        for piece in pieces_of(rows):
            self.logits(take_rows(x_TD, piece))
        return iter(())
