"""Experts spread over replicas: every layout against one process, and the load-balance loss against `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.parity.recovery.test_resume import part_of_run
from tests.parity.training.test_training import narrow_weights
from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.models.reference_gradients import apart
from tests.support.selection import EACH_PART, in_turn, soak_but
from tests.support.training.training_step import (
    Layout,
    close,
    dealt,
    furthest,
    gather,
    gradients_of_transformers,
    gradients_under,
    random_tokens,
    ranks_of,
    saved,
    train_under,
)
from tllm.comm.collectives.group import local_groups
from tllm.parallel.expert_dispatch import Route
from tllm.parallel.experts import Experts
from tllm.parallel.load_balance import LoadBalance
from tllm.spec.cut import spread
from tllm.spec.plan import Recompute
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.optim.optimizer import AdamW

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss_moe", "gemma4_moe")
"""Without and with a shared expert, with dense layers between, by sigmoids, in stacks with biases, beside an MLP."""
TP2 = ((1, 1),)

LAYOUTS = (
    Layout(dp=(1, 1), ep=2),
    Layout(dp=(1, 1, 1), ep=3),
    Layout(dp=(1,) * 4, ep=4),
    Layout(dp=(2, 2, 1, 1), ep=2),
    Layout(shares=((2, 1),), dp=(1, 1), ep=2),
    Layout(shares=TP2, dp=(1, 1), ep=2, experts="spread", sequence=True),
    Layout(2, "1f1b", shares=((1, 1), (2, 1, 1)), dp=(1, 1), ep=2, recompute="layer"),
    Layout(2, "zero_bubble", shares=TP2, dp=(1, 1), ep=2, sequence=True),
    Layout(2, "interleaved", chunks=2, dp=(1,) * 4, ep=2, experts="spread"),
)
TRAINED = (
    Layout(dp=(1,) * 4, ep=2, zero=1),
    Layout(2, "zero_bubble", dp=(1, 1), ep=2, zero=2, recompute="layer"),
    Layout(shares=TP2, dp=(1,) * 4, ep=2, zero=2, experts="spread", sequence=True),
    Layout(2, "1f1b", dp=(1,) * 4, ep=2, zero=3, recompute="layer"),
)


def tokens_for(layout: Layout, seed: int = 3) -> list[Tokens]:
    """As many microbatches as its shares ask for, twice where that is one each."""
    return random_tokens(sum(layout.dp) * (2 if set(layout.dp) == {1} and len(layout.dp) < 4 else 1), seed)


@EACH_PART
@pytest.mark.parametrize("case", FAMILIES)
def test_every_layout_gives_the_same_gradients(case: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    shapes, want = saved(tmp_path), {}
    for layout in in_turn(LAYOUTS, case, FAMILIES, part):
        microbatches = tokens_for(layout)
        count = len(microbatches)
        if count not in want:
            want[count] = gradients_under(tmp_path, Layout(), microbatches, torch.float64, shapes)
        loss, got = gradients_under(tmp_path, layout, microbatches, torch.float64, shapes)
        assert abs(loss - want[count][0]) < 1e-13 * loss, layout
        off, name = furthest(got, want[count][1])
        assert off < 1e-12, f"{layout}: {name} is off by {off}"


@pytest.mark.slow
@EACH_PART
@pytest.mark.parametrize("case", soak_but(FAMILIES[1::2], FAMILIES))
def test_narrow_weights_agree_closely_in_float32(case: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    narrow_weights(tmp_path)
    shapes, microbatches = saved(tmp_path), random_tokens(4)
    _, exact = gradients_under(tmp_path, Layout(), microbatches, torch.float64, shapes)
    _, want = gradients_under(tmp_path, Layout(), microbatches, torch.float32, shapes)
    rounded = apart(want, exact)
    for layout in in_turn(
        [one for one in LAYOUTS if 4 % sum(one.dp) == 0], case, [*FAMILIES[1::2], *FAMILIES], part, count=1
    ):
        _, got = gradients_under(tmp_path, layout, microbatches, torch.float32, shapes)
        for name, off in apart(got, want).items():
            # That of a key's bias is nothing but a small difference, which float32 itself rounds by more.
            assert off < max(1e-6, 3 * rounded[name]), f"{layout}: {name} is off by {off}"


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "steps"), [(TRAINED[-1], 8), *soak_but([], [(layout, 30) for layout in TRAINED])])
def test_steps_give_the_same_weights(layout: Layout, steps: int, tmp_path: Path) -> None:
    save_model("qwen2_moe", tmp_path, num_hidden_layers=2)
    shapes, batches = saved(tmp_path), [random_tokens(4, seed) for seed in range(steps)]
    options = dict(optimizer=AdamW(beta2=0.95), weight_decay=0.1, clip=1.0)
    want = train_under(tmp_path, Layout(), batches, torch.float64, shapes, 1e-3, **options)
    got = train_under(tmp_path, layout, batches, torch.float64, shapes, 1e-3, **options)
    assert want[0][0] - want[0][-1] > 0.01 and max(want[1]) > 1.0, "it learns, and is clipped"
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(got[1], want[1], rtol=1e-11, atol=0)
    off, name = furthest(got[2], want[2])
    assert off < 1e-11, f"{name} is off by {off}"


@pytest.mark.parametrize("turned", [False, True], ids=["from", "to"])
def test_a_save_goes_on_with_other_experts_on_each_rank(turned: bool, tmp_path: Path) -> None:
    save_model("qwen2_moe", tmp_path, num_hidden_layers=2)
    shapes, batches = saved(tmp_path), [random_tokens(5, step) for step in range(2)]
    _, _, want = train_under(tmp_path, Layout(), batches, torch.float64, shapes, 1e-2)
    layouts = [Layout(dp=(1,) * 5, ep=5, zero=1), Layout(shares=TP2, experts="spread")]
    for layout, step in zip(reversed(layouts) if turned else layouts, range(2), strict=True):
        ranks = ranks_of(tmp_path, layout, torch.float64)
        groups = local_groups(len(ranks), name="save")
        together = zip(ranks, groups, strict=True)
        in_threads([partial(part_of_run, *one, tmp_path / "run", range(step, step + 1)) for one in together])
        close(ranks)
    off, name = furthest(gather(ranks, lambda rank, index: rank.parameters[index], shapes), want)
    assert off < 1e-12, f"{name} is off by {off}"


BALANCED = (
    Layout(shares=TP2, sequence=True),
    Layout(2, "zero_bubble", recompute="layer"),
    Layout(cp=3),
    Layout(2, "1f1b", shares=TP2, dp=(1, 1), cp=2, ep=2, experts="spread", sequence=True),
)


@pytest.mark.parametrize("case", soak_but(["qwen3_moe"], ["mixtral", "qwen3_moe"]))
def test_balance_is_learned_alike_under_every_layout(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    shapes, microbatches = saved(tmp_path), random_tokens(4)
    _, plain = gradients_under(tmp_path, Layout(), microbatches, torch.float64, shapes)
    want, aux, loads = balanced(tmp_path, Layout(), microbatches, shapes)
    assert furthest(want, plain)[0] > 0.01, "it changes what is learned"
    tokens = sum(len(microbatch.ids_T) for microbatch in microbatches)
    assert all(int(load.sum()) == 2 * tokens for load in loads.values())
    assert 2 < aux < 5, "between what alike experts cost and what one chosen by all does"
    for layout in BALANCED:
        got, other_aux, other_loads = balanced(tmp_path, layout, microbatches, shapes)
        off, name = furthest(got, want)
        assert off < 1e-12, f"{layout}: {name} is off by {off}"
        assert other_aux == pytest.approx(aux, rel=1e-13), layout
        assert other_loads.keys() == loads.keys()
        assert all(torch.equal(load, other_loads[name]) for name, load in loads.items()), layout


def balanced(
    folder: Path, layout: Layout, microbatches: list[Tokens], shapes: dict[str, Tensor]
) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Gradients, the load-balance loss without its coefficient, and how often each expert was chosen."""
    ranks = ranks_of(folder, layout, torch.float64, balance=0.1)
    in_threads([partial(rank.gradients, microbatches) for rank in ranks])
    named = gather(ranks, lambda rank, index: rank.buckets.accumulator.view(index), shapes)
    close(ranks)
    loads: dict[str, Tensor] = {}
    for balance in (rank.mesh.balance for rank in ranks):
        for name, load in balance.loads().items():
            loads[name] = loads.get(name, 0) + load
    return named, sum(rank.mesh.balance.mean for rank in ranks), loads


def test_balance_is_that_of_transformers(tmp_path: Path) -> None:
    """One layer, one microbatch, one document: there both say the same."""
    truth = save_model("mixtral", tmp_path, num_hidden_layers=1)
    narrow_weights(tmp_path, truth)
    shapes, (microbatch, *_) = saved(tmp_path), random_tokens(1)
    length = microbatch.lengths[0]
    one = Tokens(microbatch.ids_T[:length], microbatch.labels_T[:length], torch.arange(length), [length])

    def learn(model: transformers.PreTrainedModel, microbatches: list[Tokens]) -> float:
        out = model(one.ids_T[None], output_router_logits=True)
        (F.cross_entropy(out.logits[0], one.labels_T) + 0.1 * out.aux_loss).backward()
        return float(out.aux_loss.detach())

    want_aux, want = gradients_of_transformers(truth, [one], tmp_path / "gradients", learn)
    ranks = ranks_of(tmp_path, Layout(), torch.float32, balance=0.1)
    ranks[0].gradients([one])
    got = gather(ranks, lambda rank, index: rank.buckets.accumulator.view(index), shapes)
    assert ranks[0].mesh.balance.mean == pytest.approx(want_aux, rel=1e-6)
    chosen = {name: tensor for name, tensor in want.items() if tensor.any()}  # an expert may have had no token
    assert furthest({name: got[name] for name in chosen}, chosen)[0] < 1e-6
    assert not any(got[name].any() for name in want.keys() - chosen.keys())


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_bytes_between_replicas_are_those_of_the_formula(recompute: Recompute, tmp_path: Path) -> None:
    """n rows that go to another rank cost (D + 2 K) + D + D + (D + K) numbers, where a forward pass is made once."""
    save_model("mixtral", tmp_path)
    layout = Layout(dp=(1, 1, 1), ep=3, recompute=recompute)
    microbatches = random_tokens(6)
    ranks = ranks_of(tmp_path, layout, torch.float32)
    in_threads([partial(rank.gradients, microbatches) for rank in ranks])
    close(ranks)
    moved = sum(link.bytes_moved for rank in ranks for link in rank.mesh.ep.send.values())
    width, choices = 48, 2
    go, again = (4 * width + 3 * choices) * 4, (width + 2 * choices) * 4
    calls = 4 * len(microbatches)
    want = go * rows_that_leave(tmp_path, layout, microbatches) + calls * 2 * 8
    if recompute == "layer":
        want += again * rows_that_leave(tmp_path, layout, microbatches) + calls * 2 * 8
    assert moved == want


def rows_that_leave(folder: Path, layout: Layout, microbatches: list[Tokens]) -> int:
    """How often, over all layers, a rank other than a token's own holds one of its experts, by a run on one process."""
    (rank,) = ranks_of(folder, Layout(), torch.float32)
    replica_of = [r for r, part in enumerate(dealt(microbatches, layout.dp)) for _ in part]
    calls: dict[Experts, int] = {}
    count = 0

    def see(experts: Experts, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        nonlocal count
        own = replica_of[calls.get(experts, 0)]
        calls[experts] = calls.get(experts, 0) + 1
        for replica, (first, stop) in enumerate(spread((0, 5), layout.ep)):
            if replica != own:
                count += int(((inputs[2] >= first) & (inputs[2] < stop)).any(-1).sum())

    for module in rank.chunks[0].modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(see)
    rank.gradients(microbatches)
    close([rank])
    return count


def lose_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that others have worked on count for nothing."""
    inner = Route.back

    def forget(route: Route, x_NW: Tensor) -> Tensor:
        mine_NW = torch.cat([p if r == route.ep.rank else p * 0 for r, p in enumerate(x_NW.split(route.counts))])
        return inner(route, mine_NW)

    monkeypatch.setattr(Route, "back", forget)


def turn_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go where nobody holds their experts."""
    inner = Route.__init__
    monkeypatch.setattr(Route, "__init__", lambda route, e, holders, ep: inner(route, e, holders[::-1], ep))


def add_up_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are summed over dp, as if every replica held the same."""
    monkeypatch.setattr(BucketLayout, "group_of", lambda layout, number: layout.groups.dp)


def balance_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = LoadBalance.__init__
    monkeypatch.setattr(LoadBalance, "__init__", lambda b, c, layers, tp, cp: inner(b, c, layers, None, cp))


def balance_each_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = LoadBalance.__init__
    monkeypatch.setattr(LoadBalance, "__init__", lambda b, c, layers, tp, cp: inner(b, c, layers, tp, None))


FAULTS = (
    (lose_what_comes_back, Layout(dp=(1, 1), ep=2)),
    (turn_the_ranks, Layout(dp=(1, 1), ep=2)),
    (add_up_over_all, Layout(dp=(1, 1, 1, 1), ep=2)),
    (balance_on_every_rank, Layout(shares=TP2)),
    (balance_each_part_alone, Layout(cp=2)),
)


@pytest.mark.parametrize(("fault", "layout"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_in_one_place_shows(
    fault: Callable[[pytest.MonkeyPatch], None], layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("mixtral", tmp_path, num_hidden_layers=2, num_local_experts=4)  # parts of one size, or sums would fail
    shapes, microbatches = saved(tmp_path), random_tokens(4)
    want, _, _ = balanced(tmp_path, Layout(), microbatches, shapes)
    right, _, _ = balanced(tmp_path, layout, microbatches, shapes)
    assert furthest(right, want)[0] < 1e-12
    fault(monkeypatch)
    wrong, _, _ = balanced(tmp_path, layout, microbatches, shapes)
    assert furthest(wrong, want)[0] > 1e-4
