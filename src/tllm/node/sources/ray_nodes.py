"""`RayNodes`: nodes from a Ray cluster. A placement group holds what they need, an actor on each runs a worker.

A worker that ends, with its Ray node or alone, gets a new actor. Where the node is gone the actor waits until Ray has a
place for it: on a node that comes back, that is added by hand, or that Ray's autoscaler adds for the placement group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tllm.cluster.connection import parse_address
from tllm.core.errors import ClusterError, TllmError, counted
from tllm.node.sources.local_workers import AGAIN_SECONDS, END_SECONDS
from tllm.node.sources.node_source import Labels, OnFailure
from tllm.node.sources.ray_cluster import RayCluster, RayRequest
from tllm.node.sources.ray_worker import RayWorker
from tllm.node.worker import WorkerSettings

log = logging.getLogger("tllm.node")

LOOK_SECONDS = 0.5


@dataclass
class _Seat:
    """One bundle of the placement group, and the actor in it: its present one, or a later one at `again`."""

    number: int
    actor: Any = None
    where: dict[str, str] = field(default_factory=dict)
    again: float = 0.0

    @property
    def node(self) -> str:
        return f"ray-{self.number}"


class RayNodes:
    """A `NodeSource`. The first `start` places all actors; the later ones find them placed anew already.

    `settings` are those of each worker but for its name and where it joins. `token` is one that stays good, because an
    actor may have to wait for long; without it the one of the first `start` is used.
    """

    def __init__(self, cluster: RayCluster, request: RayRequest, settings: WorkerSettings, token: str = "") -> None:
        self._cluster, self._request, self._settings, self._token = cluster, request, settings, token
        self._seats: list[_Seat] = []
        self._calls: dict[Any, _Seat] = {}  # by what Ray will put the answer into
        self._group: Any = None
        self._bundle: dict[str, float] = {}
        self._fail: OnFailure = lambda error: None
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, fail: OnFailure) -> None:
        self._fail = fail

    def start(self, count: int, address: str, token: str) -> None:
        """ClusterError where Ray does not answer."""
        if self._thread is not None:
            return
        host, port = parse_address(address)
        self._settings = msgspec.structs.replace(self._settings, host=host, port=port, token=self._token or token)
        self._bundle = self._cluster.bundle(self._request, count)
        self._request = replace(self._request, resources=self._bundle)
        here = len(self._cluster.suitable(self._request))
        if here < count and self._request.spread == "STRICT_SPREAD":
            log.warning(
                "waits %g s at most for %d nodes of Ray with %s each, and there are %d",
                self._request.seconds, count, self._request, here,
            )  # fmt: skip
        with _rays_errors(self._cluster):
            self._group = self._cluster.ray.util.placement_group(
                [self._bundle] * count,
                strategy=self._request.spread,
                bundle_label_selector=[dict(self._request.labels)] * count if self._request.labels else None,
            )
            self._seats = [_Seat(number) for number in range(count)]
            for seat in self._seats:
                self._place(seat)
        self._thread = threading.Thread(target=self._follow, name="ray nodes", daemon=True)
        self._thread.start()

    def nodes(self) -> Mapping[str, Labels]:
        return {seat.node: {"engine": "ray", **seat.where} for seat in self._seats}

    def stop(self) -> None:
        """Wait a little for the workers' own end; then their actors are ended, and what they held is free again."""
        self._is_ending.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(ClusterError), _rays_errors(self._cluster):
                running = [call for call, seat in self._calls.items() if seat.where]
                if running:
                    self._cluster.ray.wait(running, num_returns=len(running), timeout=END_SECONDS)
                for seat in self._seats:
                    if seat.actor is not None:
                        self._cluster.ray.kill(seat.actor)
                self._cluster.ray.util.remove_placement_group(self._group)
        self._cluster.close()

    def _place(self, seat: _Seat) -> None:
        """A new actor in this seat, which Ray places as soon as it can."""
        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU", "memory")}
        in_group = self._cluster.scheduling.PlacementGroupSchedulingStrategy
        actor = self._cluster.ray.remote(RayWorker).options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            memory=self._bundle.get("memory"),
            resources=others or None,
            max_restarts=0,
            scheduling_strategy=in_group(self._group, placement_group_bundle_index=seat.number),
        )
        seat.actor, seat.where = actor.remote(), {}
        self._calls[seat.actor.place.remote()] = seat

    def _follow(self) -> None:
        """The thread: hands each actor its worker once it is placed, and replaces those that ended."""
        try:
            with _rays_errors(self._cluster):
                deadline = time.monotonic() + self._request.seconds
                is_placed = False
                while not self._is_ending.is_set():
                    for call in self._finished():
                        self._take(call)
                    is_placed = is_placed or all(seat.where for seat in self._seats)
                    if not is_placed and time.monotonic() > deadline:
                        is_placed = True  # said once
                        self._fail(self._lack())
                    for seat in self._seats:
                        if seat.again and time.monotonic() > seat.again:
                            seat.again = 0.0
                            log.info("asks Ray for %s again", seat.node)
                            self._place(seat)
        except TllmError as error:
            self._fail(error)

    def _finished(self) -> Sequence[Any]:
        if not self._calls:
            self._is_ending.wait(LOOK_SECONDS)
            return ()
        done, _ = self._cluster.ray.wait(list(self._calls), timeout=LOOK_SECONDS)
        return list(done)

    def _take(self, call: Any) -> None:
        """An actor was placed, or its worker or the actor itself has ended."""
        seat = self._calls.pop(call)
        try:
            answer = self._cluster.ray.get(call)
        except self._cluster.ray.exceptions.RayError as error:
            if isinstance(error, self._cluster.ray.exceptions.RaySystemError):
                raise
            self._ended(seat, "ended", _last_words(error))
            return
        if not seat.where:
            seat.where = dict(answer)
            settings = msgspec.structs.replace(self._settings, node=seat.node, threads=self._threads())
            text = msgspec.json.encode(settings).decode()
            self._calls[seat.actor.run.remote(text, settings.threads, os.getcwd())] = seat
        else:
            how, tail = answer
            self._ended(seat, how, tail.rpartition("\n")[2])

    def _ended(self, seat: _Seat, how: str, last: str) -> None:
        if self._is_ending.is_set():
            return
        place = f" on {seat.where['address']}" if seat.where else ", not placed yet,"
        hint = f"its last words: {last}" if last else "the logs of Ray on that node tell more"
        self._fail(ClusterError(f"the actor of {seat.node}{place} {how}", hint))
        self._cluster.ray.kill(seat.actor)
        seat.actor, seat.where = None, {}
        seat.again = time.monotonic() + AGAIN_SECONDS

    def _threads(self) -> int:
        return self._settings.threads or max(1, int(self._bundle["CPU"]))

    def _lack(self) -> ClusterError:
        """That too few nodes came."""
        wanted, alive = len(self._seats), len(self._cluster.nodes())
        suitable = len(self._cluster.suitable(self._request))
        hint = "free or add nodes (`ray status` shows what is taken), or give fewer --nodes"
        if self._request.spread == "STRICT_SPREAD" and suitable < wanted:
            hint += "; --ray-strategy SPREAD puts several on one"
        return ClusterError(
            f"Ray had no place for {counted(wanted, 'node')} with {self._request} each within "
            f"{self._request.seconds:g} s: of its {alive} nodes {suitable} have that, less what others have taken",
            hint,
        )


def _last_words(error: Exception) -> str:
    """Of an error of Ray's, whose text has a traceback in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextlib.contextmanager
def _rays_errors(cluster: RayCluster) -> Iterator[None]:
    """Ray's errors as ours: its cluster does not answer, or refuses what was asked."""
    try:
        yield
    except (cluster.ray.exceptions.RayError, ValueError, ConnectionError) as error:
        raise ClusterError(
            f"Ray failed: {_last_words(error)}", "see `ray status`, and its logs on the machine of the head"
        ) from error
