"""Layers that are measured are held in as many bits as the model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.engine.measure.benchmark_layers import BenchmarkLayers, batch_of
from tllm.engine.measure.layer_speed import ServingSizes, serving_passes
from tllm.parallel.quantized_weight import quantized, weight_bytes
from tllm.planner.cost.rank_bytes import layer_bytes
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


def test_a_survey_of_a_model_in_few_bits() -> None:
    rules = ((r".*_proj", Coding(4, 32)), ("lm_head", Coding(8, 32)), ("model.embed_tokens", Coding(8, 32)))
    spec = replace(spec_of(4), quantization=Quantization("int4", rules))
    found = serving_passes(spec, torch.float32, ServingSizes((1,), prompt=20, chunk=16), seconds=0.2)
    assert all(one.seconds > 0 for one in (*found.layers, *found.logits))
