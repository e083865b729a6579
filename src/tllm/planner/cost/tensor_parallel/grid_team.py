"""`GridTeam`: the seconds that a batch takes on the devices of a stage whose ranks form a grid, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.message_time import (
    TimeBreakdown,
    all_reduce_time,
    transfer_after_compute,
    transfer_time,
)
from tllm.planner.cost.rank_bytes import part_of_width
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts
from tllm.planner.cost.stage_team import StageTeam
from tllm.planner.cost.tensor_parallel.serving_traffic import GroupSums, StageSums
from tllm.spec.cut import cut_grid, cut_stage
from tllm.spec.grid.grid_shape import GridShape
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.spec.plan import Plan

PLAYED_ROWS = 32
"""Layers over replies of up to so many rows are played elsewhere, as surveys time them, and computed on a grid, which
takes a device's `unplayed_seconds` more."""


class GridTeam(StageTeam):
    """Products come from blocks of weights, and sums go along rows and columns; several squares divide the tokens.

    Where tokens see those after them each square computes all.
    """

    def __init__(
        self, spec: ModelSpec, cluster: Cluster, devices: Sequence[int], shape: GridShape, facts: ServingFacts
    ) -> None:
        if facts.weight_bits is not None and facts.has_few_bits:
            raise PlanError(
                f"tensor={shape.mode} and weights of {facts.weight_bits:g} bits: few bits are not cut both ways",
                "leave tensor out: all models are cut one way (tensor=1d)",
            )
        super().__init__(spec, cluster, devices, cut_grid(spec, shape), facts)
        link = cluster.slowest_link(self.devices, in_memory=False)  # which rows and columns do not share
        self.link = link.with_sync_overhead(link.layer_sync_overhead)
        self._held = [part_of_width(held, shape, place) for place, held in enumerate(self._held)]
        self._squares = shape.depth if shape.mode == "2.5d" and not spec.bidirectional else 1
        square = GridShape("2d", shape.side) if shape.mode == "2.5d" else shape
        self._parts, self._sums = square.width_parts, StageSums(spec, square, square.ranks)

    def _own(self, batch: ExpectedBatch) -> ExpectedBatch:
        """What one square has of a batch."""
        if batch.tokens < self._squares:
            return batch
        count = self._squares
        return replace(batch, tokens=batch.tokens / count, sequences=max(1.0, batch.sequences / count))

    def _work(self, layer: LayerSpec, batch: ExpectedBatch, place: int) -> TimeBreakdown:
        time = super()._work(layer, self._own(batch), place)
        is_played_elsewhere = batch.rows == batch.tokens <= PLAYED_ROWS
        return time.plus(TimeBreakdown(operations=self._each[place].unplayed_seconds)) if is_played_elsewhere else time

    def _overhead(self, layer: LayerSpec, batch: ExpectedBatch) -> float:
        sums = self._sums.of_layer(layer, 1)
        sent = sum((one.ranks - 1) * self._bytes(one) for one in sums) * self._own(batch).tokens
        return len(sums) * self.link.sync_overhead + sent * self.link.compute_overhead

    def _all_reduces(self, layer: LayerSpec, batch: ExpectedBatch) -> TimeBreakdown:
        time, own = TimeBreakdown(), self._own(batch)
        for one in self._sums.of_layer(layer, 1):
            time = time.plus(self._seconds(one, own.tokens))
        if own is batch:
            return time
        cut = max(self.cuts, key=lambda cut: cut.kv_heads[1] - cut.kv_heads[0])
        keys = 2 * (cut.kv_heads[1] - cut.kv_heads[0]) * self.spec.head_dim * self.facts.message_bytes
        return time.plus(transfer_time((self._squares - 1) * keys * own.tokens, self.link))

    def _end_sums(self, first: bool, last: bool, batch: ExpectedBatch) -> TimeBreakdown:
        time, own = TimeBreakdown(), self._own(batch)
        if first:
            for one in self._sums.of_ends(1, 1, True, False):
                time = time.plus(self._seconds(one, own.tokens))
        if last:
            for one in self._sums.of_ends(1, 1, False, True):
                time = time.plus(self._seconds(one, batch.rows))
        return time.plus(self._put_together(last, own, own is not batch))

    def _put_together(self, last: bool, own: ExpectedBatch, is_divided: bool) -> TimeBreakdown:
        """The columns and the squares' rows of hidden states, as they leave the stage or, of rows alone, are sampled
        from: a rank sends what it has to each other one."""
        time, parts = TimeBreakdown(), self._parts
        sent = own.tokens * self.spec.hidden_size * self.facts.message_bytes
        if not last:
            time = time.plus(transfer_after_compute((parts - 1) / parts * sent, self.link))
        if is_divided:
            rows = sent / parts if last else sent
            time = time.plus(transfer_after_compute((self._squares - 1) * rows, self.link))
        return time

    def _seconds(self, one: GroupSums, tokens: float) -> TimeBreakdown:
        return all_reduce_time(one.ranks, self._bytes(one) * tokens, self.link)

    def _bytes(self, one: GroupSums) -> float:
        """Of one token, in the group that has most."""
        item = self.facts.message_bytes
        return max(one.elements) * (max(item, 4) if one.is_wide else item)


def stage_teams(
    spec: ModelSpec, plan: Plan, cluster: Cluster, devices: Sequence[int], facts: ServingFacts
) -> list[StageTeam]:
    """The team of each stage of a plan, whose rank r runs on `devices[r]`. Raises PlanError where it cannot be cut."""
    teams = list[StageTeam]()
    for index, stage in enumerate(plan.stages):
        shape, of_stage = plan.grid_of(index), [devices[rank] for rank in plan.ranks(index)]
        if shape is None:
            teams.append(StageTeam(spec, cluster, of_stage, cut_stage(spec, stage.shares, plan.experts), facts))
        else:
            teams.append(GridTeam(spec, cluster, of_stage, shape, facts))
    return teams
