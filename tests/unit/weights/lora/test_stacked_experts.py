"""Adapters of experts that PEFT has stacked: each expert's own numbers, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from tllm.core.errors import WeightsError
from tllm.weights.lora.adapter_files import ADAPTER_FILES
from tllm.weights.lora.held_adapter import HeldFiles
from tllm.weights.lora.stacked_experts import StackedTensor, stacked, taken_apart

COUNT, RANK, WIDTH, HIDDEN = 3, 2, 5, 4
SHAPES = {
    f"model.layers.1.block_sparse_moe.experts.{expert}.{part}": (1, 1)
    for expert in range(COUNT)
    for part in ("w1", "w2", "w3")
}
NAME = "base_model.model.model.layers.1.mlp.experts"


def adapter(tensors: dict[str, torch.Tensor], **config: Any) -> HeldFiles:
    keys = dict(peft_type="LORA", r=RANK, target_modules=["q_proj"], **config)
    return HeldFiles(dict(zip(ADAPTER_FILES, (json.dumps(keys).encode(), save(tensors)), strict=True)))


def test_each_expert_has_its_rows_of_a_and_its_columns_of_b() -> None:
    """By PEFT's own sum: the update of an element of an expert's weight, a product at a time."""
    a, b = torch.randn(COUNT * RANK, HIDDEN), torch.randn(2 * WIDTH, RANK * COUNT)
    down_a, down_b = torch.randn(COUNT * RANK, WIDTH), torch.randn(HIDDEN, RANK * COUNT)
    names = [f"{NAME}.base_layer.lora_A.weight", f"{NAME}.base_layer.lora_B.weight"]
    names += [f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"]
    wanted = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    files = taken_apart(
        adapter(dict(zip(names, (a, b, down_a, down_b), strict=True)), target_parameters=wanted), SHAPES
    )
    assert files is not None
    found, config = load(files[ADAPTER_FILES[1]]), json.loads(files[ADAPTER_FILES[0]])
    assert config["target_modules"] == ["q_proj", "w1", "w2", "w3"] and not config["target_parameters"]
    assert len(found) == COUNT * 3 * 2
    for expert in range(COUNT):
        own = f"base_model.model.model.layers.1.block_sparse_moe.experts.{expert}"
        for part, first, whole_a, whole_b in (("w1", 0, a, b), ("w3", WIDTH, a, b), ("w2", 0, down_a, down_b)):
            made = found[f"{own}.{part}.lora_B.weight"] @ found[f"{own}.{part}.lora_A.weight"]
            for row in range(len(made)):
                for column in range(made.shape[1]):
                    want = sum(
                        whole_b[first + row, r * COUNT + expert] * whole_a[expert * RANK + r, column]
                        for r in range(RANK)
                    )
                    assert abs(made[row, column] - want) < 1e-5


def test_an_adapter_of_linears_alone_is_left_as_it_is() -> None:
    assert taken_apart(adapter({"x": torch.ones(1)}), SHAPES) is None
    assert taken_apart(adapter({"x": torch.ones(1)}, target_parameters=[]), SHAPES) is None


@pytest.mark.parametrize(
    ("config", "rows", "words"),
    [
        (dict(target_parameters=["experts.router"]), 6, "gate_up_proj and down_proj of experts are read"),
        (dict(target_parameters="experts.down_proj"), 6, "gate_up_proj and down_proj of experts are read"),
        (dict(target_parameters=["experts.down_proj"], rank_pattern={"down_proj": 4}), 6, "and rank_pattern"),
        (dict(target_parameters=["experts.down_proj"]), 7, "does not fit 3 experts"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(config: dict[str, Any], rows: int, words: str) -> None:
    tensors = {f"{NAME}.lora_A.weight": torch.ones(rows, WIDTH)}
    with pytest.raises(WeightsError, match=words):
        taken_apart(adapter(tensors, **config), SHAPES)


def test_experts_of_a_layer_that_has_none_are_refused() -> None:
    tensors = {f"{NAME}.lora_A.weight": torch.ones(6, WIDTH)}
    with pytest.raises(WeightsError, match=r"experts of model\.layers\.1, and of this model no expert") as refused:
        taken_apart(adapter(tensors, target_parameters=["experts.down_proj"]), {"model.layers.1.self_attn.q_proj": 0})
    assert refused.value.hint == "is the adapter of this model?"


@pytest.mark.parametrize(("layers", "named"), [(1, ["mlp.experts.down_proj"]), (2, ["layers.0.mlp.experts.down_proj"])])
def test_layers_are_named_where_not_every_one_is_adapted(layers: int, named: list[str]) -> None:
    tensors: list[Any] = [
        SimpleNamespace(name=f"model.layers.0.mlp.experts.{expert}.down_proj.lora_{kind}.weight")
        for expert in range(2)
        for kind in "AB"
    ]
    made, wanted = stacked(tensors, layers)
    assert wanted == named and len(made) == 2


def test_experts_are_stacked_by_their_numbers_and_not_by_their_names() -> None:
    """By names number 10 comes before number 2, as in a save."""
    names = sorted(f"model.layers.0.mlp.experts.{expert}.down_proj.lora_A.weight" for expert in range(11))
    tensors: list[Any] = [SimpleNamespace(name=name) for name in names]
    ((stack,), _) = stacked(tensors, 1)
    assert isinstance(stack, StackedTensor)
    assert [part.name.split(".")[5] for part in stack.parts] == [str(expert) for expert in range(11)]
