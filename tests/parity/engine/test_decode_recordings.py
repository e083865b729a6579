"""Replies whose layers are recorded and played: the bits of those that are computed, whatever a layer is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models.families import save_model
from tllm.engine.decode_recordings import DecodeRecordings
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import Request, SamplingParams

SIZES = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=96)
REPLY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPTS = [[7 * i + at for at in range(count)] for i, count in enumerate((13, 6, 9))]

PLAYED = {
    "llama": ("float32", "auto"),
    "qwen2": ("bfloat16", "auto"),  # biases
    "qwen3": ("float16", "int8"),  # norms of heads
    "gemma2": ("bfloat16", "fp8"),  # windows, caps, four norms
}
"""Families, with the dtype and the cache that each is served with."""


def answers(engine: Engine, turn: int) -> list[Any]:
    """One reply alone, then three together."""
    found = []
    for number, prompts in enumerate((PROMPTS[:1], PROMPTS)):
        asked = [Request(id=f"{turn} {number} {i}", prompt_ids=tuple(p), params=REPLY) for i, p in enumerate(prompts)]
        streams = [engine.submit(request) for request in asked]
        found.append([[(out.token_ids, out.logprobs) for out in stream] for stream in streams])
    return found


def engine_of(family: str, folder: Path, dtype: str, kv_cache_dtype: str) -> Engine:
    save_model(family, folder, **SIZES)
    config = EngineConfig(
        dtype=dtype, quantize="int4", cache_tokens=256, max_num_seqs=4, page_size=4, kv_cache_dtype=kv_cache_dtype
    )
    return Engine.load(folder, "pp=1", config)


@pytest.mark.parametrize("family", PLAYED)
def test_a_played_reply_has_the_bits_of_one_that_is_computed(family: str, tmp_path: Path) -> None:
    with engine_of(family, tmp_path, *PLAYED[family]) as engine:
        stage = engine.driver.stage
        recordings = stage.graphs
        assert isinstance(recordings, DecodeRecordings)
        played = answers(engine, 0)
        made = {rows: one.x_TD.data_ptr() for rows, one in recordings.recorded.items() if one is not None}
        assert recordings.refused == "" and {1, 3} <= made.keys()
        again = answers(engine, 1)
        stage.graphs = None
        assert played == again == answers(engine, 2)
        assert made.items() <= {rows: one.x_TD.data_ptr() for rows, one in recordings.recorded.items() if one}.items()


def test_layers_for_which_there_is_no_kernel_are_computed(tmp_path: Path) -> None:
    """What such a layer adds is multiplied by a number, by torch."""
    with engine_of("granite", tmp_path, "float32", "auto") as engine:
        recordings = engine.driver.stage.graphs
        assert isinstance(recordings, DecodeRecordings)
        found = answers(engine, 0)
        assert recordings.refused and not recordings.recorded
        engine.driver.stage.graphs = None
        assert answers(engine, 1) == found
