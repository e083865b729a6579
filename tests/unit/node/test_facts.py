from __future__ import annotations

import pytest

from tllm.ground.errors import ConfigError
from tllm.node.facts import facts_of


def test_memory_that_was_given_is_what_there_is() -> None:
    whole = facts_of("a", ("h", 1), {}).memory_bytes
    given = facts_of("a", ("h", 1), {}, memory=whole // 2)
    assert given.memory_bytes == whole // 2
    with pytest.raises(ConfigError, match=f"{whole + 1} bytes of memory were given and this machine has {whole}"):
        facts_of("a", ("h", 1), {}, memory=whole + 1)
