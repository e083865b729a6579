"""Routers with a correction bias: their faults show, and the bias keeps its float32 where weights have 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.model.test_layouts import prompt
from tests.support.models.families import save_model
from tests.support.models.layouts import logits_under, spec_of
from tests.support.models.slow_load import text_tensors_of
from tllm.model.transformer import Transformer, build
from tllm.node.roles.comparison_record import digest, fingerprints
from tllm.parallel.mesh import whole
from tllm.spec.model_spec import MoeSpec
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import load
from tllm.weights.safetensors_index import Index

BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm4_moe")
    save_model("glm4_moe", path)
    return path


def forget_the_correction(moe: MoeSpec) -> MoeSpec:
    return replace(moe, correction_bias=False)


def take_all_groups(moe: MoeSpec) -> MoeSpec:
    return replace(moe, groups=1)


def forget_the_scale(moe: MoeSpec) -> MoeSpec:
    return replace(moe, weight_scale=1.0)


def take_weights_as_they_are(moe: MoeSpec) -> MoeSpec:
    return replace(moe, renormalise=False)


@pytest.mark.parametrize("change", [forget_the_correction, take_all_groups, forget_the_scale, take_weights_as_they_are])
def test_a_fault_of_the_router_shows(change: Callable[[MoeSpec], MoeSpec], folder: Path) -> None:
    def mutate(rank: int, model: Transformer) -> None:
        for layer in list(model.layers.values())[1:]:
            router = layer.mlp.router
            router.moe = change(router.moe)
            if not router.moe.correction_bias:
                router.correction.data.zero_()

    want = logits_under(folder, "pp=1", prompt(24), torch.float64)
    got = logits_under(folder, "pp=1", prompt(24), torch.float64, mutate)
    assert (got - want).abs().max() > 1e-2


def test_the_correction_is_not_rounded(folder: Path) -> None:
    spec, source = spec_of(folder), LocalFiles(folder)
    index = Index.read(source)
    for device in (None, "meta"):
        model = build(spec, whole(spec), torch.bfloat16, device)
        load(model, index, source, torch.bfloat16)
        held = model.layers["2"].mlp.router
        assert torch.equal(held.correction, text_tensors_of(folder)[BIAS])
        assert held.gate.weight.dtype == torch.bfloat16
        (seen,) = (one for one in fingerprints(model) if one.name == BIAS)
        assert seen.digest == digest(index.slice(source, BIAS).to(torch.bfloat16)), (
            "as `verify` reads it from the files"
        )
    assert build(spec, whole(spec), torch.float64).layers["2"].mlp.router.correction.dtype == torch.float64
