from __future__ import annotations

import pytest

from tllm.cluster.connection import Address
from tllm.core.errors import ConfigError
from tllm.core.memory import amount
from tllm.node.machine import process_facts
from tllm.node.machine.process_facts import facts_of, usable_memory
from tllm.planner.cost.cache_room import AT_REST_BYTES, RUNTIME_BYTES


def test_memory_that_was_given_is_what_there_is() -> None:
    whole = facts_of("a", ("h", 1), {}).memory_bytes
    given = facts_of("a", ("h", 1), {}, memory=whole // 2)
    assert given.memory_bytes == whole // 2
    with pytest.raises(
        ConfigError,
        match=f"{amount(whole + 1)} of memory were given and this machine has {amount(whole)}, 1 B too little",
    ):
        facts_of("a", ("h", 1), {}, memory=whole + 1)
    with pytest.raises(
        ConfigError, match=f"1000 B of memory were given and a worker takes {amount(RUNTIME_BYTES)} before"
    ):
        facts_of("a", ("h", 1), {}, memory=1000)


def test_a_build_of_torch_that_takes_more_leaves_less_of_what_was_given() -> None:
    assert usable_memory(2**30, AT_REST_BYTES) == 2**30
    assert usable_memory(2**30, AT_REST_BYTES + 2**29) == 2**29
    assert usable_memory(None, AT_REST_BYTES + 2**29) == facts_of("a", ("h", 1), {}).memory_bytes
    with pytest.raises(ConfigError, match=f"a worker takes {amount(RUNTIME_BYTES + 2**29)} before any weight"):
        usable_memory(2**29, AT_REST_BYTES + 2**29)


def test_whose_memory_a_node_takes() -> None:
    whole, own = facts_of("a", ("h", 1), {}), facts_of("a", ("h", 1), {}, memory=2**30)
    shared = facts_of("a", ("h", 1), {}, memory=2**30, is_shared=True)
    assert whole.room == (whole.host_name, whole.memory_bytes) and not whole.is_given
    assert own.room == ("a", 2**30) and shared.room == (whole.host_name, 2**30)
    assert own.is_given and shared.is_given


def test_a_wildcard_is_reached_by_an_address_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens on all addresses of IPv6 does not listen on those of IPv4."""
    routes = {"192.0.2.1": "192.168.0.7", "2001:db8::1": "fd00::7"}

    def own_address(towards: Address) -> str:
        if towards[0] not in routes:
            raise ConfigError("no way")
        return routes[towards[0]]

    monkeypatch.setattr(process_facts, "own_address", own_address)
    reached = [process_facts.reachable(host) for host in ("0.0.0.0", "", "::", "10.0.0.1")]
    assert reached == ["192.168.0.7", "192.168.0.7", "fd00::7", "10.0.0.1"]
    del routes["2001:db8::1"]
    with pytest.raises(ConfigError, match="no default route for IPv6") as refused:
        process_facts.reachable("::")
    assert refused.value.hint.endswith("--cluster-host fd00::10")
    del routes["192.0.2.1"]
    with pytest.raises(ConfigError, match="no default route for IPv4") as refused:
        process_facts.reachable("0.0.0.0")
    assert refused.value.hint.endswith("or :: for that of IPv6")
