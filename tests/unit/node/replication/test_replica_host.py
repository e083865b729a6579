"""Who may hold a replica of the coordinator's state, and what is said of who may not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tllm.cluster.certificates import Authority, Identity, make_request
from tllm.cluster.messages import ServeReplica
from tllm.core.errors import ConfigError
from tllm.node.replication.replica_host import JoinedReplica


def identity(name: str) -> Identity:
    authority = Authority.create()
    key, request = make_request(name)
    return Identity(name, authority.sign(request, name), key, authority.pem)


def test_a_node_that_cannot_read_the_rows_takes_no_replica_until_it_can(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"

    async def scene() -> None:
        host = JoinedReplica(identity("north"), "127.0.0.1", {})
        asked = ServeReplica(2.5, (str(rows),))
        with pytest.raises(ConfigError, match=rf"{rows} cannot be read on .*, and whoever coordinates reads it"):
            await host.serve(asked)
        rows.touch()
        try:
            place = await host.serve(asked)
            assert place.node == "north" and await host.serve(asked) == place
        finally:
            await host.close()

    asyncio.run(scene())
