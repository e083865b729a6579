"""Hidden states in fewer bytes between stages that are processes: what crosses the wire, and the error that is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tllm.cli.commands.status import network_lines
from tllm.cluster.settings import Narrowing
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.status_report import report
from tllm.node.roles.compressed_ring import NARROW_ERROR
from tllm.node.serve.open_cluster import open_cluster
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.request import Request, SamplingParams

PROMPT = tuple(range(1, 100))
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


async def served(model: Path, how: Narrowing, least: float = 1) -> tuple[int, list[str], dict[str, float]]:
    """A prompt through two stages: payload bytes over the wire between them, once they are as many as `least`, what is
    said of it, and all numbers."""
    sizes = EngineConfig(cache_tokens=1024, max_model_len=256, dtype="float32", narrow_wire=how)
    async with open_cluster(model, "pp=2", sizes) as cluster:
        request = Request(id="r", prompt_ids=PROMPT, params=ONE)
        tokens = [token async for output in cluster.submit(request) for token in output.token_ids]
        assert len(tokens) == 1
        async with asyncio.timeout(60):  # heartbeats bring the counts
            while (moved := report(cluster.state)["nodes"][0]["links"].get("0>1", 0)) < least or (
                how == "bf16" and not cluster.stats().get(NARROW_ERROR)  # 0 in a beat from before the prompt
            ):
                await asyncio.sleep(0.05)
        return moved, network_lines(report(cluster.state)), dict(cluster.stats())


def test_a_prompt_takes_half_the_bytes_and_the_error_is_told(model: Path) -> None:
    wide = 4 * len(PROMPT) * spec_from_config(read_config(model)).hidden_size
    narrow, said, numbers = asyncio.run(served(model, "bf16", 0.5 * wide))
    (line,) = said
    assert line.startswith("network: hop 0>1: bf16, 0.1") and line.endswith("off on normal numbers")
    assert 1e-4 < numbers[NARROW_ERROR] < 2**-8
    assert 0.5 * wide < narrow < 0.75 * wide, "beside the states goes what is to be computed"


@pytest.mark.soak
def test_auto_measures_and_says_what_it_chose(model: Path) -> None:
    _, said, numbers = asyncio.run(served(model, "auto"))
    (line,) = said
    assert line.startswith("network: hop 0>1: ") and " MB/s, " in line
    assert line.endswith("as it is") == (NARROW_ERROR not in numbers)
