"""A node that is stopped is named alike to all who look: the probe, the status, the operator's log, the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.multi.faults.test_serving_recovery import joining, play
from tests.support.models.families import save_model
from tllm.cluster.heartbeat import BEAT_SECONDS
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.sources.node_source import JoinLine
from tllm.server.app import build_app

NODE = "node east (rank 0, layers [0, 4))"
TOKENS = 8192  # many seconds of them, for a heartbeat tells only once a second that a request runs
BODY = {"prompt": [1, 2, 3], "max_tokens": TOKENS - 8, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.mark.timeout(300)
def test_a_stopped_node_is_named_alike_to_all_who_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model("llama", tmp_path, max_position_embeddings=TOKENS)

    async def scene() -> None:
        with contextlib.ExitStack() as stack:
            nodes = []

            def join(count: int, address: str, token: str) -> None:
                if not nodes:
                    nodes.append(stack.enter_context(joining(address, token, "east")))

            sizes = EngineConfig(cache_tokens=TOKENS, max_model_len=TOKENS)
            async with open_cluster(
                tmp_path, "pp=1", sizes, ClusterOptions(local=0, source=JoinLine(join), join_seconds=120)
            ) as cluster:
                transport = httpx.ASGITransport(app=build_app(cluster))
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as http:
                    asking = asyncio.create_task(http.post("/v1/completions", json={"model": tmp_path.name, **BODY}))
                    while cluster.stats().get("running") != 1:
                        await asyncio.sleep(0.01)
                    os.kill(nodes[0].pid, signal.SIGSTOP)
                    while (probe := await http.get("/health/progress")).status_code == 200:
                        await asyncio.sleep(0.02)
                    assert not cluster.status()["fault"], "it is named before it is lost"
                    assert probe.status_code == 503 and NODE in probe.json()["error"]["message"]
                    assert NODE in (await http.get("/v1/cluster")).json()["trouble"]
                    said = (await asking).text
                    await asyncio.sleep(BEAT_SECONDS)
                    assert NODE in (await http.get("/v1/cluster")).json()["fault"]
            (error,) = (json.loads(line[6:])["error"] for line in said.split("\n") if '"error"' in line)
            assert error["code"] == "node_lost" and NODE in error["message"]

    play(scene)
    told = [message for message in caplog.messages if NODE in message]
    late, *later = told
    assert late.startswith(f"{NODE} has been silent for ") and any(one.startswith("lost east: ") for one in later)
