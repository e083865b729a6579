"""Who may hold a replica of the coordinator's state, and what is said of who may not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tllm.cluster.certificates import Authority, Identity, make_request
from tllm.cluster.messages import ServeReplica
from tllm.core.errors import ConfigError
from tllm.node.replication.replica_host import JoinedReplica
from tllm.node.weights.model_folder import ModelFolder


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


def test_a_node_without_the_models_files_takes_no_replica_until_it_has_them(tmp_path: Path) -> None:
    """It is asked before it has a part in an epoch, as a machine that has just come back is."""
    save_model("llama", tmp_path / "model")
    asked = ServeReplica(2.5, folder=str(tmp_path / "here"), model=ModelFolder(tmp_path / "model").files)

    async def scene() -> None:
        host = JoinedReplica(identity("north"), "127.0.0.1", {})
        with pytest.raises(ConfigError, match=r"here on .* does not hold the model's files"):
            await host.serve(asked)
        (tmp_path / "model").rename(tmp_path / "here")
        try:
            assert (await host.serve(asked)).node == "north"
        finally:
            await host.close()

    asyncio.run(scene())
