from __future__ import annotations

import pytest

from tllm.cluster.connection import listen, own_address
from tllm.core.errors import ConfigError

NO_HOST = "a..b"
"""A name with an empty label, which no machine can have: Python refuses it before the system is asked."""


def test_a_name_that_no_machine_has_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {NO_HOST}:0: .+"):
        listen(NO_HOST, 0)


def test_there_is_no_way_to_a_name_that_no_machine_has() -> None:
    with pytest.raises(ConfigError, match=rf"no way to {NO_HOST} from this machine: .+"):
        own_address((NO_HOST, 80))
