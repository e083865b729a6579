"""Counted from the spec, against what torch counts while the model runs, and against sums written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.models.families import FAMILIES, UNLIKE, save_model
from tests.support.models.layouts import spec_of
from tests.support.models.packed_causal import PackedCausal
from tests.support.selection import soak_but
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.planner.cost.flops import forward_flops, layer_flops, seen, training_flops
from tllm.spec.cut import cut_stage
from tllm.training.data.batch_tensors import Tokens
from tllm.training.objectives.next_token import NextTokenLoss

COUNTED = (*UNLIKE, "deepseek_v2_moe", "gemma4_e2b", "arcee", "phi3")
"""Beside parts of their own also a latent without one for queries, shared keys, another MLP and fused products."""


@pytest.mark.parametrize("case", soak_but(COUNTED, FAMILIES))
def test_as_many_as_torch_counts_but_for_scores_that_are_not_seen(case: str, tmp_path: Path) -> None:
    """The plain attention makes all T x T scores, of each layer: these come off on one side, the seen on the other.

    A gated delta net makes products of chunks, in place of those of one token after another that count.
    """
    save_model(case, tmp_path)
    spec, lengths = spec_of(tmp_path), [9, 5, 30]
    tokens = sum(lengths)
    ids_T, positions_T = torch.randint(0, 101, (tokens,)), torch.cat([torch.arange(n) for n in lengths])
    model = build(spec, whole(spec), torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.requires_grad_()
    attend = PackedCausal(model.attention_specs(), lengths)
    lengths_T = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    batch = Tokens(ids_T, ids_T, positions_T, lengths)
    with FlopCounterMode(display=False) as forward:
        loss = NextTokenLoss(whole(spec))(model, model(ids_T, positions_T, attend, lengths_T), batch).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    attending = [(layer, 4 * spec.num_heads * (layer.head_dim or spec.head_dim)) for layer in spec.layers]
    attending = [(layer, per_pair) for layer, per_pair in attending if not layer.delta]
    made = sum(per_pair * tokens * tokens for _, per_pair in attending)
    wanted = sum(per_pair * seen(n, layer.window) for layer, per_pair in attending for n in lengths)
    made_back, wanted_back = 2 * made, 2 * wanted
    for of in [layer.delta for layer in spec.layers if layer.delta]:
        K, V = of.key_dim, of.value_dim
        state, pairs, corrections = (2 * of.value_heads * count for count in (K * V, K, V))
        made += sum(3 * n * state + 2 * n * n * pairs + n * n * corrections for n in lengths)
        # The first state is 0 and the last one of no use: neither has a gradient. A triangular system counts for
        # nothing, and its gradient is a product.
        made_back += sum(2 * n * state + 4 * n * n * pairs + 3 * n * n * corrections for n in lengths)
        wanted, wanted_back = wanted + 3 * tokens * state, wanted_back + 6 * tokens * state
    assert forward.get_total_flops() - made + wanted == forward_flops(spec, lengths)
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total - made - made_back + wanted + wanted_back == training_flops(spec, lengths)


@pytest.mark.parametrize(("length", "window"), [(7, None), (7, 3), (7, 7), (7, 9), (1, 1), (1, None)])
def test_seen_pairs(length: int, window: int | None) -> None:
    pairs = sum(0 <= q - k < (window or length) for q in range(length) for k in range(length))
    assert seen(length, window) == pairs


@pytest.mark.parametrize("case", ["llama", "qwen2_moe", "gemma2"])
@pytest.mark.parametrize("experts", ["cut", "spread"])
def test_the_ranks_of_a_stage_share_the_work(case: str, experts: str, tmp_path: Path) -> None:
    """What each rank does for itself (a kv head held twice, the router) is all that comes on top."""
    save_model(case, tmp_path)
    spec, lengths = spec_of(tmp_path), [9, 5]
    cuts = cut_stage(spec, (1, 1), "spread" if experts == "spread" else "cut")
    (one,) = cut_stage(spec, (1,))
    for layer in spec.layers:
        moe = layer.moe
        twice = (
            0
            if moe is None
            else 14 * 2 * spec.hidden_size * (moe.num_experts + bool(moe.shared_width and moe.shared_gate))
        )
        parts = sum(layer_flops(spec, layer, cut, lengths) for cut in cuts)
        assert parts - twice == pytest.approx(layer_flops(spec, layer, one, lengths), rel=1e-12)


def test_logits_are_for_predicted_tokens(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    assert forward_flops(spec, [20]) - forward_flops(spec, [20], 15) == 2 * 5 * spec.hidden_size * spec.vocab_size
