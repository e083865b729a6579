"""The plans by which several machines may divide a model of a role, where the job leaves that to the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tllm.planner.cluster.device_kinds import counts_upto, kinds_of
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.roles.role_room import Room
from tllm.planner.search.layer_cuts import balanced_bounds, quickest_bounds
from tllm.planner.search.stage_options import whole_shares
from tllm.spec.plan import Plan

MOST_TEAMS = 8
"""Sets of unlike devices, of so many each, for which layers are cut: each cut is tried on every set of devices."""


def divisions(whole: Room, by_layer: Sequence[int], named: Sequence[int] | None, size: int) -> Iterator[Plan]:
    """Of a model for `size` devices: stages, each of which some hold by tensor parallelism; and, where devices are
    unlike, stages of unlike layers and unlike shares of each layer, as memory or speed has it.

    `whole`: room for the model on one device; `by_layer`: bytes of each of its layers, with the end that goes with it;
    `named`: which devices may have it, in the order of their parts.
    """
    layers, plans = len(by_layer), list[Plan]()
    for pp in (count for count in range(1, min(size, layers) + 1) if size % count == 0):
        text = ",".join(f"{axis}={count}" for axis, count in (("pp", pp), ("tp", size // pp)) if count > 1)
        plans.append(Plan.parse(text, layers))
    teams = list(_teams(whole, named, size))
    if size <= layers:
        for cut in dict.fromkeys(cut for team in teams for cut in _cuts(whole, by_layer, team)):
            plans.append(Plan.parse(f"pp={size},layers={'+'.join(map(str, cut))}", layers))
    for shares in dict.fromkeys(shares for team in teams for shares in _shares(whole, team)):
        plans.append(Plan.parse(f"tp={size},shares={':'.join(map(str, shares))}", layers))
    yield from dict.fromkeys(plans)  # a cut may be even


def _teams(whole: Room, named: Sequence[int] | None, size: int) -> Iterator[Sequence[int]]:
    """Devices that may hold one model, in the order of its parts: those that are named, else the strongest first, of
    any kinds; of many such choices those with most memory."""
    if named is not None:
        yield from (named[at : at + size] for at in range(0, len(named), size))
        return
    kinds, teams = kinds_of(whole.cluster, range(1, len(whole.cluster))), list[list[int]]()
    for counts in counts_upto(tuple(map(len, kinds)), size):
        if sum(counts) == size:
            team = [device for kind, count in zip(kinds, counts, strict=True) for device in kind[:count]]
            teams.append(sorted(team, key=whole.strength, reverse=True))
    yield from sorted(teams, key=lambda team: -sum(whole.cluster.devices[one].memory for one in team))[:MOST_TEAMS]


def _cuts(whole: Room, by_layer: Sequence[int], team: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, where devices are unlike: so that the fullest is as empty as possible; so that the slowest
    is as fast, for completions, of which several are under way; or so that all together are, for rows that pass one
    stage after another: then the fastest have as much as they have room for."""
    rooms, seconds = _memory(whole, team), [whole.seconds(device) for device in team]
    if len(set(rooms)) > 1:
        yield _lengths(balanced_bounds([[nbytes / room for nbytes in by_layer] for room in rooms]))
    if len(set(seconds)) > 1:
        of_layers = [[each] * len(by_layer) for each in seconds]
        yield _lengths(balanced_bounds(of_layers))
        if (bounds := quickest_bounds(of_layers, by_layer, rooms)) is not None:
            yield _lengths(bounds)


def _shares(whole: Room, team: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shares of each layer, where devices are unlike: in proportion to their speeds, and to their memory."""
    for amounts in ([1 / whole.seconds(device) for device in team], _memory(whole, team)):
        shares = whole_shares(amounts)
        if len(set(shares)) > 1:
            yield shares


def _memory(whole: Room, team: Sequence[int]) -> list[int]:
    """Bytes that each has for its part of a model."""
    return [max(whole.cluster.devices[device].memory - TRAINER_BYTES, 1) for device in team]


def _lengths(bounds: Sequence[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(bounds))
