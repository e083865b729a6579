"""The kinds of link that a user may choose between for the wires of a plan, and what makes each of them."""

from __future__ import annotations

from collections.abc import Collection

from tllm.cluster.certificates import Identity
from tllm.cluster.settings import Wiring
from tllm.comm.links.carried_link import Carry
from tllm.comm.links.grpc_link import GrpcCarry
from tllm.comm.links.torch_link import TorchCarry


def carry_of(wiring: Wiring, identity: Identity, hosts: Collection[str]) -> Carry | None:
    """What makes such links between `hosts` of our own; None where ours stay. Errors as the makers' say."""
    match wiring.kind:
        case "tls":
            return None
        case "grpc":
            return GrpcCarry(identity)
        case "torch":
            return TorchCarry(hosts, wiring.trusted)
