"""Replies whose layers are recorded and played: the bits of those that are computed, whatever a layer is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tllm.engine import decode_recordings
from tllm.engine.decode_recordings import DecodeRecordings
from tllm.engine.engine import Engine
from tllm.engine.recording_choice import COMPUTED, has_plain_products
from tllm.engine.recording_choice import PLAYED as PLAYED_WAY
from tllm.engine.schedule.batch import Batch, BatchEntry
from tllm.engine.schedule.limits import EngineConfig
from tllm.kernels import library
from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice
from tllm.kernels.recording.recorder import recordable
from tllm.spec.request import Request, SamplingParams

SIZES = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=96)
REPLY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPTS = [[7 * i + at for at in range(count)] for i, count in enumerate((13, 6, 9))]

PLAYED = {
    "llama": ("pp=1", "float32", "auto", "int4"),
    "qwen2": ("tp=2", "bfloat16", "auto", "int4"),  # biases
    "qwen3": ("pp=2,tp=1+2", "float16", "int8", None),  # norms of heads
    "gemma2": ("pp=1", "bfloat16", "fp8", None),  # windows, caps, four norms
    "granite": ("pp=1", "bfloat16", "auto", "int4"),  # what a layer adds is multiplied by a number
}
"""Families, with the plan, the dtype and the cache that each is served with, and what its weights are rounded to."""


def answers(engine: Engine, turn: int) -> list[Any]:
    """One reply alone, then three together; with plain weights each alone, as their bits depend on what is computed
    with them."""
    found = []
    few_bits = not has_plain_products(list(engine.stages[0].model.own_layers.values()))
    for number, prompts in enumerate((PROMPTS[:1], PROMPTS) if few_bits else ([one] for one in PROMPTS)):
        asked = [Request(id=f"{turn} {number} {i}", prompt_ids=tuple(p), params=REPLY) for i, p in enumerate(prompts)]
        streams = [engine.submit(request) for request in asked]
        found.append([[(out.token_ids, out.logprobs) for out in stream] for stream in streams])
    return found


def engine_of(family: str, folder: Path, plan: str, dtype: str, cache: str, quantize: Any, drafts: int = 0) -> Engine:
    save_model(family, folder, **SIZES)
    config = EngineConfig(
        dtype=dtype,
        quantize=quantize,
        cache_tokens=256,
        max_num_seqs=4,
        num_speculative_tokens=drafts,
        page_size=4,
        kv_cache_dtype=cache,
        enable_prefix_caching=False,  # products of fewer rows of a prompt have other bits, where weights are plain
    )
    return Engine.load(folder, plan, config)


def recordings_of(engine: Engine) -> list[DecodeRecordings]:
    """Those of each rank."""
    found = [stage.graphs for stage in engine.stages]
    assert all(isinstance(one, DecodeRecordings) for one in found)
    return found  # type: ignore[return-value]


def kernels_alone() -> library.Library:
    """Kernels with which all plain products are theirs, played or not."""
    kernels = library.loaded()
    assert kernels is not None
    return recordable(kernels)


def faster(name: str) -> Any:
    return lambda ways: Choice(name, dict.fromkeys(ways, 1.0), is_sure=False)


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_recordings, "choices", Autotuned[Any]("layers of replies"))
    monkeypatch.setattr(decode_recordings, "CACHED_BYTES", 0)


@pytest.mark.parametrize("family", PLAYED)
def test_a_played_reply_has_the_bits_of_one_that_is_computed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same products: plain weights are then multiplied by the kernel alone, in prompts too."""
    monkeypatch.setattr(decode_recordings, "by_turns", faster(PLAYED_WAY))
    with engine_of(family, tmp_path, *PLAYED[family]) as engine:
        of_ranks = recordings_of(engine)
        played = answers(engine, 0)
        made = [{rows: one.x_TD.data_ptr() for rows, one in it.recorded.items() if one} for it in of_ranks]
        assert all(it.refused == "" and not it.computed for it in of_ranks)
        assert all(1 in one for one in made)
        assert played == answers(engine, 1)
        if PLAYED[family][-1] is None:
            alone = kernels_alone()
            monkeypatch.setattr(library, "loaded", lambda: alone)
            played = answers(engine, 2)
        for stage in engine.stages:
            stage.graphs = None
        assert played == answers(engine, 3)
        again = [{rows: one.x_TD.data_ptr() for rows, one in it.recorded.items() if one} for it in of_ranks]
        assert all(first.items() <= now.items() for first, now in zip(made, again, strict=True))


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_rows_of_several_replies(quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with draft tokens, over a window's edge and in pages that lie apart; the first batch is computed alike."""
    monkeypatch.setattr(decode_recordings, "by_turns", faster(PLAYED_WAY))
    tables = ((0, 2), (5, 1)), ((8, 3),)
    entries = (BatchEntry(0, 7, 4, 6, tables[0], num_draft_tokens=3), BatchEntry(1, 9, 1, 6, tables[1]))
    batch = Batch(0, entries, (3, 1, 4, 1, 5))
    with engine_of("gemma2", tmp_path, "pp=1", "bfloat16", "fp8", quantize, 3) as engine, torch.inference_mode():
        answers(engine, 0)  # the cache is no longer empty
        (recordings,), (stage,) = recordings_of(engine), engine.stages
        with library.using(kernels_alone()):
            want = stage._layers(batch, None).clone()
        assert recordings.takes(batch)
        for _ in range(3):  # computed, recorded, played
            assert torch.equal(recordings(batch, None), want)
        assert recordings.recorded[5] is not None


def test_layers_that_are_faster_computed_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows by itself, by the products that are the fastest for each weight."""
    timed = []

    def by_turns(ways: Any) -> Choice:
        timed.append({name: way() for name, way in ways.items()})
        return faster(COMPUTED)(ways)

    monkeypatch.setattr(decode_recordings, "by_turns", by_turns)
    with engine_of("llama", tmp_path, "pp=1", "bfloat16", "auto", None) as engine:
        (recordings,) = recordings_of(engine)
        found = answers(engine, 0)
        assert len(timed) == len(recordings.computed) and 1 in recordings.computed and not recordings.recorded
        engine.stages[0].graphs = None
        assert found == answers(engine, 1)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_layers_for_which_there_is_no_kernel_are_computed(tmp_path: Path, quantize: str | None) -> None:
    """Torch chooses its experts."""
    with engine_of("qwen3_moe", tmp_path, "pp=1", "float32", "auto", quantize) as engine:
        (recordings,) = recordings_of(engine)
        found = answers(engine, 0)
        assert recordings.refused and not recordings.recorded
        engine.stages[0].graphs = None
        assert answers(engine, 1) == found
