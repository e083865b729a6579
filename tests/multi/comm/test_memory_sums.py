"""Two processes of one machine that hold a model's layers together: their sums in memory, and by links."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tllm.cluster.settings import IntraHost, Wiring
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster
from tllm.spec.quantized.weight_form import Quantize
from tllm.spec.request import Request, SamplingParams

PROMPT = tuple(range(1, 60))
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)


async def served(folder: Path, quantize: Quantize | None, inside: IntraHost) -> tuple[list[object], set[str]]:
    """A reply with its log-probabilities, and what the ranks say of their network."""
    sizes = EngineConfig(
        cache_tokens=256, max_model_len=128, dtype="float32", quantize=quantize, wiring=Wiring(intra_host=inside)
    )
    async with asyncio.timeout(200), open_cluster(folder, "tp=2", sizes, ClusterOptions(threads=1)) as cluster:
        request = Request(id="r", prompt_ids=PROMPT, params=PARAMS)
        outputs = [output async for output in cluster.submit(request)]
        reply = [(output.token_ids, output.logprobs) for output in outputs if not output.computed_tokens]
        return list(reply), {member.loaded.network for member in cluster.state.ranks if member.loaded}


@pytest.mark.parametrize("quantize", soak_but(["int4"], [None, "int4"]))
def test_sums_in_memory_have_the_bits_of_those_by_links(quantize: Quantize | None, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    in_memory, said = asyncio.run(served(tmp_path, quantize, "memory"))
    assert said == {"tp: sums in memory that 2 ranks share"}
    by_links, silent = asyncio.run(served(tmp_path, quantize, "links"))
    assert silent == {""}
    assert in_memory == by_links and len(in_memory) == 12
