"""`DeviceMesh`: devices in rank order, arranged along the axes of a training plan. All meshes of a small cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.device_kinds import counts_upto, devices_for, kinds_of, orders_of

MOST_ORDERS = 24
"""Orders of devices that are all tried; of more only the cluster's own and those by speed."""


class Axes(NamedTuple):
    """The number of ranks along each axis of the mesh."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class DeviceMesh:
    """Devices in the order of ranks, and the axes along which they are arranged."""

    devices: tuple[int, ...]
    axes: Axes

    def at(self, replica: int, stage: int, cp: int, tp: int) -> int:
        """The device at a place of the mesh."""
        axes = self.axes
        return self.devices[((replica * axes.pp + stage) * axes.cp + cp) * axes.tp + tp]

    def team(self, replica: int, stage: int) -> tuple[int, ...]:
        """The devices of one replica's stage, in the order of ranks."""
        size = self.axes.cp * self.axes.tp
        start = (replica * self.axes.pp + stage) * size
        return self.devices[start : start + size]

    def places(self, stage: int) -> list[list[int]]:
        """For each place on tp the devices of a stage there, over all replicas and cp ranks."""
        ranks = list(product(range(self.axes.dp), range(self.axes.cp)))
        return [[self.at(replica, stage, cp, tp) for replica, cp in ranks] for tp in range(self.axes.tp)]


class EveryMesh:
    """Meshes of every choice of devices, in every order that costs differently, with every choice of axes."""

    def __init__(self, cluster: Cluster, rate: Callable[[int], float], first_device: int | None) -> None:
        self._kinds = kinds_of(cluster, range(len(cluster)))
        self._rate, self._first = rate, first_device
        self.is_exhaustive = True
        """Whether no order was left out; final once all meshes were made."""

    def __iter__(self) -> Iterator[DeviceMesh]:
        first = self._first
        orders = (order for order in self._orders() if first in (None, *order))
        for devices in dict.fromkeys(_led_by(first, order) for order in orders):
            for axes in axes_of(len(devices)):
                yield DeviceMesh(devices, axes)

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """Choices of devices, in orders that cost differently."""
        whole = tuple(map(len, self._kinds))
        for counts in counts_upto(whole, sum(whole)):
            orders, are_all = orders_of(counts, MOST_ORDERS)
            if are_all:
                yield from (devices_for(self._kinds, order) for order in orders)
            else:
                self.is_exhaustive = False
                devices = devices_for(self._kinds, orders[0])
                some = [tuple(sorted(devices)), self._by_speed(devices, -1), self._by_speed(devices, 1)]
                yield from dict.fromkeys(some)

    def _by_speed(self, devices: Sequence[int], sign: int) -> tuple[int, ...]:
        """Devices by their rate of products: the fastest first for a `sign` of -1, last for 1."""
        return tuple(sorted(devices, key=lambda device: sign * self._rate(device)))


def axes_of(ranks: int) -> Iterator[Axes]:
    """Every choice of axes for that many ranks."""
    for tp in _divisors(ranks):
        for cp in _divisors(ranks // tp):
            for pp in _divisors(ranks // tp // cp):
                yield Axes(ranks // tp // cp // pp, pp, cp, tp)


def _led_by(first: int | None, devices: tuple[int, ...]) -> tuple[int, ...]:
    """The same order, but with the device `first` in front, if one is given."""
    return devices if first is None else (first, *(device for device in devices if device != first))


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
