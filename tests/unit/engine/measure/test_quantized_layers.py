"""Layers that are measured are held in as many bits as the model's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.engine.measure import benchmark_layers, layer_speed
from tllm.engine.measure.benchmark_layers import BenchmarkLayers, batch_of
from tllm.engine.measure.layer_speed import ServingSizes, serving_passes
from tllm.engine.schedule.batch import Batch
from tllm.parallel.quantized_weight import quantized, weight_bytes
from tllm.planner.cost.rank_bytes import kv_bytes, layer_bytes
from tllm.spec.cut import cut_stage
from tllm.spec.quantized.weight_bits import Coding, Quantization

FLOAT8 = Coding(8, 128, rows=128, number="float", beside=32)


@pytest.mark.parametrize("coding", [Coding(4, 32), Coding(8, 32), FLOAT8], ids=["int4", "int8", "float8"])
def test_linears_are_packed_and_take_the_bytes_that_are_counted(coding: Coding) -> None:
    rules = ((r".*\.(q|k|v|o|gate|up|down)_proj", coding),)
    spec = replace(spec_of(4), quantization=Quantization("int", rules))
    layers = BenchmarkLayers(spec, torch.float32, 1)
    held = [parameter for parameter in layers.model.parameters() if quantized(parameter)]
    assert len(held) == 4 * layers.num_layers
    taken = sum(weight_bytes(parameter) for parameter in layers.model.parameters())
    counted = sum(layer_bytes(spec, number, cut_stage(spec, (1,))[0], 4) for number in range(layers.num_layers))
    assert taken == pytest.approx(counted, rel=0.02), "outputs are padded to blocks of 16, tensors to lines of 64 bytes"
    batch = batch_of(2, 1, 20)
    with torch.inference_mode():
        layers.forward_pass(batch, [batch])()


def test_a_survey_of_a_model_in_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the keys that a token behind more of them reads, with a clock that these alone move."""
    clock, plain = [0.0], benchmark_layers._forward

    def late(model: Any, cache: Any, batch: Batch, x_TD: Any) -> Any:
        clock[0] += 1e-4 * batch.entries[0].start
        return plain(model, cache, batch, x_TD)

    monkeypatch.setattr(benchmark_layers, "_forward", late)
    monkeypatch.setattr(BenchmarkLayers, "_recordings", lambda *of_batch: None)
    monkeypatch.setattr(layer_speed, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=lambda seconds: None))
    rules = ((r".*_proj", Coding(4, 32)), ("lm_head", Coding(8, 32)), ("model.embed_tokens", Coding(8, 32)))
    spec = replace(spec_of(4), quantization=Quantization("int4", rules))
    found = serving_passes(spec, torch.float32, ServingSizes((1,), prompt=20, chunk=16), seconds=0.2)
    assert all(one.seconds > 0 for one in (*found.layers, *found.logits))
    (whole,) = cut_stage(spec, (1,))
    of_key = BenchmarkLayers(spec, torch.float32, 1).num_layers * kv_bytes(spec, spec.layers[0], whole, 4, "auto")
    assert found.keys_read == pytest.approx(of_key / 1e-4)
