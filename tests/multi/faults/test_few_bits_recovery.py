"""Serving with weights of few bits outlives a node to the bit: ids and log-probabilities are those of one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.multi.faults.test_serving_recovery import kill, play
from tests.support.models.families import save_model
from tests.support.models.gguf_models import write_gguf
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.spec.request import Output, Request, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts two processes that load torch

SHAPE = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=256)
CONFIG = EngineConfig(
    dtype="float32", page_size=4, cache_tokens=160, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=120
)
TOKENS, KILLED = 60, 80
"""Tokens of a reply, and of all when a node is killed. With the prompts' 111 the cache cannot hold so many."""

PROMPTS = [tuple(range(first, first + count)) for first, count in ((1, 39), (5, 32), (9, 24), (13, 16))]
PARAMS = [
    SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(
        max_tokens=TOKENS, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True, frequency_penalty=0.3, logprobs=2
    ),
]

Answers = list[list[object]]
"""For each request its token ids, and their log-probabilities with those of the likeliest others."""


def requests(turn: str) -> list[Request]:
    return [Request(id=f"{turn} {i}", prompt_ids=ids, params=PARAMS[i % 2]) for i, ids in enumerate(PROMPTS)]


def told(streams: list[list[Output]]) -> Answers:
    return [
        [[token for out in one for token in out.token_ids], [score for out in one for score in out.logprobs]]
        for one in streams
    ]


class Disturbed:
    """Reads the streams of all requests, and kills the node of a rank once so many tokens have come."""

    def __init__(self, cluster: Serving, turn: str, after: int | None = None) -> None:
        self.cluster, self.turn, self.after = cluster, turn, after
        self.count = 0

    async def __call__(self) -> Answers:
        return told(await asyncio.gather(*map(self._read, requests(self.turn))))

    async def _read(self, request: Request) -> list[Output]:
        outputs = []
        async for output in self.cluster.submit(request):
            outputs.append(output)
            self.count += len(output.token_ids)
            if self.after is not None and self.count >= self.after:
                self.after = None
                kill(self.cluster, 1)
        return outputs


async def preempted(cluster: Serving) -> None:
    """Wait until the first rank tells, with a heartbeat, that it has preempted sequences in this epoch."""
    async with asyncio.timeout(60):
        while not cluster.stats().get("preemptions"):
            await asyncio.sleep(0.02)


def of_one_process(model: Path, config: EngineConfig) -> Answers:
    """With room for all."""
    with Engine.load(model, "pp=1", replace(config, cache_tokens=1024, max_num_batched_tokens=512)) as engine:
        truth = told([list(stream) for stream in [engine.submit(one) for one in requests("alone")]])
        assert engine.stats()["preemptions"] == 0
    assert [len(ids) for ids, _ in truth] == [TOKENS] * len(PROMPTS)
    return truth


def test_int4_over_ranks_has_the_bits_of_one_process_after_a_loss(tmp_path: Path) -> None:
    """Undisturbed, and killed in mid-stream; both while sequences lose their pages to others and begin again."""
    save_model("llama", tmp_path, **SHAPE)
    config = replace(CONFIG, quantize="int4", kv_cache_dtype="int8")
    truth = of_one_process(tmp_path, config)

    async def scene() -> None:
        async with open_cluster(tmp_path, "tp=2", config) as cluster:
            assert await Disturbed(cluster, "quiet")() == truth
            await preempted(cluster)
            assert await Disturbed(cluster, "killed", after=KILLED)() == truth
            assert cluster.recovery.lost_ranks == 1 and cluster.state.epoch >= 2

    play(scene)


def test_q4_0_in_a_cluster_that_waits_takes_the_same_plan_up_again(tmp_path: Path) -> None:
    """With the bits of one process, and who lives keeps its weights."""
    model = write_gguf(save_model("llama", tmp_path, **SHAPE), tmp_path / "model.gguf", lambda name: "Q4_0")
    truth = of_one_process(model, CONFIG)

    async def scene() -> None:
        async with open_cluster(model, "pp=2", CONFIG, policy="wait") as cluster:
            assert await Disturbed(cluster, "killed", after=KILLED)() == truth
            assert cluster.state.epoch == 2 and cluster.state.plan == cluster.coordinator.work.plan
            kept, read = (member.loaded for member in cluster.state.ranks)
            assert kept is not None and read is not None
            assert kept.bytes_read == 0 < read.bytes_read, "who lives reads its weights once"

    play(scene)
