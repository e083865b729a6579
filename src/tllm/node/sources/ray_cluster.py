"""`RayCluster`: a Ray cluster that somebody has started, which nodes it has, and which of them have what is asked for.

`ray` is loaded here and nowhere else, when it is asked for. Its own words are kept: addresses, resources, labels with
their selectors, how actors are spread.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tllm.cluster.connection import format_address, own_address, parse_address
from tllm.core.errors import ClusterError, ConfigError

ADDRESS_VARIABLE = "RAY_ADDRESS"
AUTO = "auto"
CLIENT = "ray://"
REACH_SECONDS = 10.0

Spread = Literal["STRICT_SPREAD", "SPREAD"]
"""One actor on a node, or as few on each as there are nodes for."""


@dataclass(frozen=True)
class RayRequest:
    """What each actor asks of the node that it is placed on.

    `resources` are a bundle as Ray writes it (`CPU`, `GPU`, `memory` in bytes, custom names), without `CPU` all that
    the nodes have; `labels` are Ray's label selectors (`"b"`, `"!b"`, `"in(b, c)"`, `"!in(b, c)"`). All must have been
    placed after `seconds`.
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    spread: Spread = "STRICT_SPREAD"
    seconds: float = 300.0

    def suits(self, resources: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Whether a node that has these could take one, if nobody else had taken a part of it."""
        wanted = {"CPU": 1.0, **self.resources}
        return all(resources.get(name, 0.0) >= amount for name, amount in wanted.items()) and all(
            selects(selector, labels.get(name)) for name, selector in self.labels.items()
        )

    def __str__(self) -> str:
        parts = [f"{amount:g} {name}" for name, amount in self.resources.items()]
        return " and ".join([*parts, *(f"{name}={selector}" for name, selector in self.labels.items())]) or "1 CPU"


def selects(selector: str, value: str | None) -> bool:
    """Whether a label's value is what a selector of Ray's asks for."""
    wanted = selector.removeprefix("!")
    among = wanted.removeprefix("in(").removesuffix(")").split(",") if wanted.startswith("in(") else [wanted]
    return (value in {one.strip() for one in among}) != selector.startswith("!")


class RayCluster:
    """A connection to a running Ray cluster, one for the process; `close` ends it unless it was there before."""

    def __init__(self, address: str = "") -> None:
        """`address` as `ray.init` takes it: HOST:PORT, ray://HOST:PORT or auto; without it RAY_ADDRESS, or auto.

        ConfigError where ray is not installed; ClusterError where no cluster answers, or it runs another Ray or Python.
        """
        try:
            self.ray: Any = importlib.import_module("ray")
            self.scheduling: Any = importlib.import_module("ray.util.scheduling_strategies")
        except ImportError as error:
            raise ConfigError(
                f"--on ray needs the package ray, and it cannot be loaded: {error}",
                'pip install "together-llm[ray]", in the version of the cluster',
            ) from error
        self._is_own = not self.ray.is_initialized()
        if self._is_own:
            self._connect(address or os.environ.get(ADDRESS_VARIABLE, "") or AUTO)

    def _connect(self, address: str) -> None:
        if address == "local":
            raise ConfigError(
                "the address local would start a Ray of its own", "give that of a running cluster, or auto"
            )
        if address != AUTO:
            _knock(address.removeprefix(CLIENT))
        quiet = dict(configure_logging=False, logging_level=logging.ERROR, log_to_driver=False)
        try:
            self.ray.init(address, **({} if address.startswith(CLIENT) else quiet))
        except (ConnectionError, TimeoutError, ValueError, RuntimeError, AssertionError) as error:
            said = " ".join(str(error).split())
            if "ersion mismatch" in said:
                raise ClusterError(
                    f"the Ray cluster at {address} runs other versions than this machine: {said}",
                    "install the same versions of ray and Python on all machines",
                ) from error
            where = "" if address == AUTO else f" at {address}"
            raise ClusterError(
                f"no Ray cluster{where} takes this machine in: {said}",
                "start one with `ray start --head`, this machine into it with `ray start --address=HOST:PORT`, or give "
                "--ray-address",
            ) from error

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that live, as `ray.nodes()` describes them."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def suitable(self, request: RayRequest) -> list[dict[str, Any]]:
        """Those that could take an actor."""
        return [node for node in self.nodes() if request.suits(node["Resources"], node.get("Labels") or {})]

    def bundle(self, request: RayRequest, count: int) -> dict[str, float]:
        """What each of `count` actors takes: the processors of a whole node, unless the request says how many.

        Of unlike nodes it is as many as each of them has; nodes that Ray may still add are taken to be like these.
        """
        if "CPU" in request.resources:
            return dict(request.resources)
        nodes = sorted((int(node["Resources"]["CPU"]) for node in self.suitable(request)), reverse=True)
        few = nodes[:count][-1] if nodes else 1
        on_each = math.ceil(count / len(nodes)) if nodes and request.spread == "SPREAD" else 1
        return {"CPU": float(max(1, few // on_each)), **request.resources}

    def own_host(self) -> str:
        """The address of this machine that the cluster's nodes reach."""
        return own_address(parse_address(str(self.ray.get_runtime_context().gcs_address)))

    def close(self) -> None:
        """Disconnect."""
        if self._is_own:
            self.ray.shutdown()


def _knock(address: str) -> None:
    """ClusterError where nobody listens: Ray itself asks for minutes, and may then end the process."""
    host, port = parse_address(address)
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {format_address((host, port))}: {error.strerror or error}",
            "start one with `ray start --head`, or give the address that it printed",
        ) from error
