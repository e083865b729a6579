"""Gradients of every parameter: one process equals `transformers` in float64, every layout equals one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.families import FAMILIES, TRAINABLE, UNLIKE, save_model
from tests.support.models.reference_gradients import Mutation, apart, gradients_under, packed, true_gradients
from tests.support.selection import EACH_PART, in_turn, soak_but
from tllm.comm.collectives.group import solo
from tllm.model.transformer import Transformer
from tllm.parallel import collectives as collective
from tllm.parallel.sequence_parallel import SequenceParallelRegion, TensorParallelRegion
from tllm.parallel.shard import shard_of
from tllm.training.optim.zero3 import unit_numbers, units_of

LAYOUTS = ("tp=2", "tp=3,shares=1:2:1", "tp=5", "pp=2", "pp=2,tp=1+2")
SPREAD = ("tp=2,experts=spread", "tp=4,experts=spread")
TOKENS = packed(
    [1, 7, 7, 18, 40]
)  # dynamic rope of `transformers` remembers the longest so far, so the longest is last


def layouts(case: str) -> tuple[str, ...]:
    return LAYOUTS + SPREAD if "moe" in case or case == "mixtral" else LAYOUTS


@pytest.mark.parametrize("case", FAMILIES)
def test_one_process_equals_transformers(case: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "weights")
    loss, want = true_gradients(truth, TOKENS, tmp_path / "gradients")
    got_loss, got = gradients_under(tmp_path / "weights", "pp=1", TOKENS, torch.float64)
    torch.testing.assert_close(got_loss, loss, rtol=1e-14, atol=0)
    learned = [tensor.norm() for name, tensor in want.items() if not name.endswith(("correction_bias", "layer_scalar"))]
    assert min(learned) > 1e-3, "a gradient of nothing would hide a fault"
    for name, distance in apart(got, want).items():
        assert distance < 1e-13, f"{case} {name}: {distance:.1e}"


@pytest.mark.slow
@EACH_PART
@pytest.mark.parametrize("case", soak_but(UNLIKE, TRAINABLE))
def test_every_layout_has_the_same_gradients(case: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    loss_64, want_64 = gradients_under(tmp_path, "pp=1", TOKENS, torch.float64)
    _, want_32 = gradients_under(tmp_path, "pp=1", TOKENS, torch.float32)
    rounded = apart(want_32, want_64)
    cuts = [(layout, sequence) for layout in layouts(case) for sequence in (False, True)]
    for layout, sequence in in_turn(cuts, case, [*UNLIKE, *TRAINABLE], part, count=1):
        loss, in_64 = gradients_under(tmp_path, layout, TOKENS, torch.float64, sequence)
        torch.testing.assert_close(loss, loss_64, rtol=1e-13, atol=0)
        for name, distance in apart(in_64, want_64).items():
            assert distance < 1e-13, f"{case} {layout} {name}: {distance:.1e}"
        _, in_32 = gradients_under(tmp_path, layout, TOKENS, torch.float32, sequence)
        for name, distance in apart(in_32, want_32).items():
            # Some of these gradients are small differences of large numbers: float32 itself rounds them by more.
            limit = max(2e-6, 3 * rounded[name])
            assert distance < limit, f"{case} {layout} {name}: {distance:.1e} over {limit:.1e} in float32"


@pytest.mark.parametrize("seed", soak_but(range(6), range(12)))
def test_odd_shapes_have_the_same_gradients(seed: int, tmp_path: Path) -> None:
    """Any number of heads, kv heads, experts, shares and tokens: fewer tokens than ranks, kv heads held three times."""
    chance = random.Random(seed)
    case = chance.choice(["llama", "olmo2", "qwen3", "qwen2_moe", "gemma2"])
    kv_heads, group = chance.choice([1, 2, 3]), chance.choice([1, 2, 3, 5])
    heads = kv_heads * group
    shape = dict(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=chance.randint(30, 101),
        hidden_size=6 * heads,
        head_dim=6 if case == "olmo2" else 8,
        intermediate_size=chance.randint(7, 60),
        num_hidden_layers=2,
        layer_types=None,
    )
    save_model(case, tmp_path, seed, **shape)
    tp = chance.randint(2, max(2, min(heads, 5))) if heads > 1 else 1
    shares = ":".join(str(chance.randint(1, 4)) for _ in range(tp))
    layout = f"tp={tp},shares={shares},experts={chance.choice(['cut', 'spread'])}"
    tokens = packed([chance.randint(1, 20) for _ in range(chance.randint(1, 3))] if seed else [2], 30)
    _, want = gradients_under(tmp_path, "pp=1", tokens, torch.float64)
    # Of a token that sees itself alone, queries and keys learn nothing: what is there then is rounding of the whole.
    floor = 1e-2 * float(torch.stack([gradient.norm() for gradient in want.values()]).norm())
    for sequence in (False, True):
        _, got = gradients_under(tmp_path, layout, tokens, torch.float64, sequence)
        for name, distance in apart(got, want, floor).items():
            assert distance < 1e-13, f"{case} {layout} of {shape}: {name}: {distance:.1e}"


@pytest.mark.parametrize("case", ["llama", "llama_mha_tied_bias", "qwen2_moe"])
def test_gradients_come_from_the_last_parameter_to_the_first(case: str, tmp_path: Path) -> None:
    """As buckets are laid out: one that waits for what comes at the very end would hold up all that are behind it."""
    arrived: list[int] = []

    def watch(rank: int, model: Transformer) -> None:
        parameters = list(model.parameters())
        numbers = unit_numbers(units_of([model]), parameters)
        assert numbers == sorted(numbers)
        for number, parameter in zip(numbers, parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: arrived.append(number))

    save_model(case, tmp_path)
    gradients_under(tmp_path, "pp=1", TOKENS, torch.float64, mutate=watch)
    assert len(set(arrived)) > 4
    assert arrived == sorted(arrived, reverse=True)


def lose_the_sum_behind_a_layer(rank: int, model: Transformer) -> None:
    model.layers["1"].seam = TensorParallelRegion(solo())


def lose_the_sum_behind_the_logits(rank: int, model: Transformer) -> None:
    model.seam = TensorParallelRegion(solo())


def take_for_whole(parameter: nn.Parameter) -> None:
    parameter.shard = replace(shard_of(parameter), gradient="whole")  # type: ignore[attr-defined]


def forget_kv_heads_held_twice(rank: int, model: Transformer) -> None:
    take_for_whole(model.layers["2"].attention.qkv_proj.weight)


def forget_the_norms_of_heads(rank: int, model: Transformer) -> None:
    take_for_whole(model.layers["2"].attention.k_norm.weight)


def forget_a_norm_of_slices(rank: int, model: Transformer) -> None:
    take_for_whole(model.layers["0"].before_mlp.weight)


def forget_the_router(rank: int, model: Transformer) -> None:
    take_for_whole(model.layers["1"].mlp.router.gate.weight)


def forget_the_tie(rank: int, model: Transformer) -> None:
    take_for_whole(model.embed_tokens.weight if model.is_first else model.lm_head.weight)


def halve_one_gradient(rank: int, model: Transformer) -> None:
    if rank == 1:
        model.layers["3"].mlp.down_proj.weight.register_hook(lambda gradient: gradient / 2)


def halve_what_one_rank_gives_back(rank: int, model: Transformer) -> None:
    if rank == 1:
        model.layers["0"].attention.qkv_proj.register_full_backward_hook(
            lambda _, inputs, __: (inputs[0] / 2, *inputs[1:])
        )


class _Turned(SequenceParallelRegion):
    def enter(self, x_TD: Tensor, tokens: int | None) -> Tensor:
        return super().enter(x_TD, tokens).roll(1, dims=0)


def turn_the_tokens(rank: int, model: Transformer) -> None:
    model.layers["1"].seam = _Turned(model.layers["1"].seam.tp)


MUTATIONS: list[tuple[Mutation, str, str, bool]] = [
    (lose_the_sum_behind_a_layer, "llama", "tp=2", False),
    (lose_the_sum_behind_the_logits, "llama", "tp=2", False),
    (forget_kv_heads_held_twice, "llama", "tp=3,shares=1:2:1", False),
    (forget_kv_heads_held_twice, "llama_mqa", "tp=2", True),
    (forget_the_norms_of_heads, "qwen3", "tp=2", False),
    (forget_the_norms_of_heads, "olmo2", "tp=3,shares=1:2:1", False),
    (forget_a_norm_of_slices, "llama", "tp=2", True),
    (forget_the_router, "mixtral", "tp=2", False),
    (forget_the_tie, "llama_mha_tied_bias", "pp=2", False),
    (halve_one_gradient, "llama", "tp=2", False),
    (halve_what_one_rank_gives_back, "llama", "tp=2", False),
    (turn_the_tokens, "llama", "tp=2", True),
]


def differs(case: str, layout: str, folder: Path, sequence: bool, mutate: Mutation) -> float:
    """The largest relative difference of a gradient; ranks that disagree are one of their own."""
    save_model(case, folder)
    _, want = gradients_under(folder, "pp=1", TOKENS, torch.float64)
    try:
        _, got = gradients_under(folder, layout, TOKENS, torch.float64, sequence, mutate)
    except AssertionError:
        return float("inf")
    return max(apart(got, want).values())


@pytest.mark.parametrize(("mutate", "case", "layout", "sequence"), MUTATIONS)
def test_a_fault_in_one_place_shows(mutate: Mutation, case: str, layout: str, sequence: bool, tmp_path: Path) -> None:
    assert differs(case, layout, tmp_path, sequence, mutate) > 1e-3


Backward = Callable[..., tuple[Tensor | None, ...]]


def doubled(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
    """The sum's backward pass summing again: gradients times the number of ranks."""
    return gradient * 2, None


def unsummed(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


@pytest.mark.parametrize(
    ("function", "backward"), [("_Reduce", doubled), ("_Copy", unsummed)], ids=["doubled", "unsummed"]
)
@pytest.mark.parametrize("case", ["llama", "olmo2", "qwen2_moe"])
def test_a_wrong_collective_shows(
    case: str, function: str, backward: Backward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(collective, function), "backward", staticmethod(backward))
    assert differs(case, "tp=2", tmp_path, False, lambda rank, model: None) > 1e-3
