from __future__ import annotations

import pytest

from tllm.core.errors import ConfigError
from tllm.node.machine.process_facts import facts_of, usable_memory
from tllm.planner.cost.cache_room import AT_REST_BYTES, RUNTIME_BYTES


def test_memory_that_was_given_is_what_there_is() -> None:
    whole = facts_of("a", ("h", 1), {}).memory_bytes
    given = facts_of("a", ("h", 1), {}, memory=whole // 2)
    assert given.memory_bytes == whole // 2
    with pytest.raises(ConfigError, match=f"{whole + 1} bytes of memory were given and this machine has {whole}"):
        facts_of("a", ("h", 1), {}, memory=whole + 1)
    with pytest.raises(ConfigError, match=f"1000 bytes of memory were given and a worker takes {RUNTIME_BYTES} before"):
        facts_of("a", ("h", 1), {}, memory=1000)


def test_a_build_of_torch_that_takes_more_leaves_less_of_what_was_given() -> None:
    assert usable_memory(2**30, AT_REST_BYTES) == 2**30
    assert usable_memory(2**30, AT_REST_BYTES + 2**29) == 2**29
    assert usable_memory(None, AT_REST_BYTES + 2**29) == facts_of("a", ("h", 1), {}).memory_bytes
    with pytest.raises(ConfigError, match=f"a worker takes {RUNTIME_BYTES + 2**29} before any weight"):
        usable_memory(2**29, AT_REST_BYTES + 2**29)


def test_whose_memory_a_node_takes() -> None:
    whole, own = facts_of("a", ("h", 1), {}), facts_of("a", ("h", 1), {}, memory=2**30)
    shared = facts_of("a", ("h", 1), {}, memory=2**30, is_shared=True)
    assert whole.room == (whole.host_name, whole.memory_bytes) and not whole.is_given
    assert own.room == ("a", 2**30) and shared.room == (whole.host_name, 2**30)
    assert own.is_given and shared.is_given
