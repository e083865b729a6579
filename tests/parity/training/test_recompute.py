"""What is worked out again gives the gradients of what was kept, to the bit, under every order and every cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.selection import covering
from tests.support.training.training_step import (
    Layout,
    Mutate,
    gradients_under,
    random_tokens,
    ranks_of,
    saved,
    train_under,
)
from tllm.model.transformer import Transformer
from tllm.spec.plan import Recompute

TP2, TP3 = ((1, 1),), ((1, 2, 1),)
HOW: tuple[Recompute, ...] = ("layer", "selective")

LAYOUTS = (
    Layout(),
    Layout(2, "1f1b", dp=(1, 1)),
    Layout(2, "zero_bubble"),
    Layout(2, "zero_bubble", shares=TP2),
    Layout(2, "interleaved", chunks=2, shares=TP2, sequence=True),
    Layout(shares=TP3, sequence=True),
    Layout(cp=2),
)


AGAIN = [replace(layout, recompute=how) for layout in LAYOUTS for how in HOW]
CASES = ("llama", "gemma2", "olmo2", "qwen2_moe")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@pytest.mark.parametrize(("layout", "case", "dtype"), covering(AGAIN, CASES, DTYPES))
def test_gradients_are_the_same_to_the_bit(layout: Layout, case: str, dtype: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    shapes, microbatches = saved(tmp_path), random_tokens(3)
    loss, want = gradients_under(tmp_path, replace(layout, recompute="none"), microbatches, DTYPES[dtype], shapes)
    same, got = gradients_under(tmp_path, layout, microbatches, DTYPES[dtype], shapes)
    assert same == loss and all(torch.equal(got[name], want[name]) for name in want), layout


SPREAD = {
    "llama_mha_tied_bias": Layout(2, "1f1b", dp=(1, 1), zero=3),
    "qwen3_next_moe": Layout(dp=(1, 1), ep=2, zero=3),
    "mixtral": Layout(dp=(1, 1), ep=2, zero=2),
}


@pytest.mark.parametrize(("case", "how"), covering(SPREAD, HOW))
def test_weights_after_steps_are_the_same_to_the_bit(case: str, how: Recompute, tmp_path: Path) -> None:
    """Where weights come and go too (ZeRO-3), and where tokens travel to their experts."""
    layout = SPREAD[case]
    save_model(case, tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(4, seed) for seed in range(2)]
    want = train_under(tmp_path, layout, batches, torch.float32, shapes, 1e-2)
    got = train_under(tmp_path, replace(layout, recompute=how), batches, torch.float32, shapes, 1e-2)
    assert got[:2] == want[:2] and all(torch.equal(got[2][name], want[2][name]) for name in want[2])


def count_attention(runs: Counter[str]) -> Mutate:
    def watch(rank: int, chunks: list[Transformer]) -> None:
        for model in chunks:
            for number, layer in model.layers.items():
                layer.attention.register_forward_hook(lambda *_, number=number: runs.update([number]))

    return watch


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zero_bubble"])
def test_each_layer_runs_twice(order: str, tmp_path: Path) -> None:
    """Also where a pass in two halves asks for each parameter's gradient by itself."""
    save_model("llama", tmp_path)
    shapes, microbatches = saved(tmp_path), random_tokens(3)
    for how, times in (("none", 1), ("layer", 2)):
        runs = Counter[str]()
        layout = Layout(2, order, recompute=how)  # type: ignore[arg-type]
        gradients_under(tmp_path, layout, microbatches, torch.float32, shapes, count_attention(runs))
        assert runs == {str(number): times * 3 for number in range(4)}


def test_a_second_run_that_differs_shows(tmp_path: Path) -> None:
    """The test above would be green for a run that keeps everything: one that is not the same must turn it red."""

    def drift(rank: int, chunks: list[Transformer]) -> None:
        layer, calls = chunks[0].layers["1"], Counter[str]()

        def grow(*_: object) -> None:
            calls["runs"] += 1
            if calls["runs"] == 2:
                layer.attention.qkv_proj.weight.data.mul_(1.01)

        layer.attention.register_forward_pre_hook(grow)

    save_model("llama", tmp_path)
    shapes, microbatches = saved(tmp_path), random_tokens(1)
    _, want = gradients_under(tmp_path, Layout(recompute="layer"), microbatches, torch.float64, shapes)
    _, got = gradients_under(tmp_path, Layout(recompute="layer"), microbatches, torch.float64, shapes, drift)
    assert not torch.equal(got["model.layers.1.mlp.up_proj.weight"], want["model.layers.1.mlp.up_proj.weight"])
    ranks = ranks_of(tmp_path, Layout(recompute="layer"), torch.float32)
    assert all(vars(layer).get("forward") is not None for layer in ranks[0].chunks[0].layers.values())
