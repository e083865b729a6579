"""A network whose links are all the same."""

from __future__ import annotations

from tllm.comm.collectives.network_model import NetworkModel


def even_network(size: int, latency: float, rate: float, message: float = 0.0) -> NetworkModel:
    """`size` machines with one rank each."""
    row = (latency,) * size, (rate,) * size
    return NetworkModel((row[0],) * size, (row[1],) * size, tuple(range(size)), message)
