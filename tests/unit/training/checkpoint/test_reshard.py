"""A save under any plan is read under any other, to the bit: stages, shares, replicas, experts, ZeRO's flat ranges."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.training.saves import Cut, Truth, held, on_ranks, world
from tllm.core.errors import PlanError, WeightsError
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import Checkpoint, open_folder
from tllm.training.checkpoint.shard_assignment import HeldBox, assign_shards
from tllm.training.state.tensor_blocks import TensorBlock, flat_blocks, model_blocks
from tllm.weights.boxes import widths
from tllm.weights.byte_source import LocalFiles
from tllm.weights.dtypes import DTYPES

TRUTHS = {
    "moe": Truth(1),
    "tied": Truth(2, tie_word_embeddings=True),
    "bfloat16": Truth(3, torch.bfloat16, num_key_value_heads=1),
}
PLANS = [
    "pp=1",
    "pp=2",
    "pp=4",
    "tp=2",
    "tp=3",
    "tp=3,shares=1:2:1",
    "tp=2,experts=spread",
    "pp=2,tp=2",
    "pp=2,tp=1+3,layers=1+3,shares=1:2:1",
    "pp=3,tp=2+1+1,experts=spread",
]
SEAM = st.floats(0, 1)
cuts = st.builds(
    Cut,
    st.sampled_from(PLANS),
    st.integers(1, 3),
    st.one_of(st.just(()), st.tuples(SEAM, SEAM)),
)


def save(truth: Truth, cut: Cut, roots: list[Path], step: int = 7) -> None:
    def work(group):  # type: ignore[no-untyped-def]
        _, blocks = held(truth, cut, group.rank)
        truth.fill(blocks)
        checkpoints = AsyncSaves(roots[group.rank % len(roots)], group)
        checkpoints.save(step, blocks, {"plan": cut.plan, "rows": [1, 2]})
        (result,) = checkpoints.wait()
        assert result.error == ""
        checkpoints.close()

    on_ranks(world(truth, cut), work)


def restored(truth: Truth, cut: Cut, roots: list[Path], step: int = 7) -> None:
    def work(group):  # type: ignore[no-untyped-def]
        _, blocks = held(truth, cut, group.rank)
        for block in blocks:
            block.tensor.fill_(torch.nan)
        checkpoints = AsyncSaves(roots[group.rank % len(roots)], group)
        opened = checkpoints.restore(blocks)
        assert opened.step == step
        assert opened.facts["rows"] == [1, 2]
        assert all(truth.holds(block) for block in blocks)
        checkpoints.close()

    on_ranks(world(truth, cut), work)


@settings(max_examples=examples(6), suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(TRUTHS)), cuts, cuts, st.integers(1, 3))
def test_any_plan_reads_any_others(case: str, before: Cut, after: Cut, nodes: int) -> None:
    one_reads_the_other(case, before, after, nodes)


@pytest.mark.soak
@pytest.mark.timeout(600)
@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(TRUTHS)), cuts, cuts, st.integers(1, 3))
def test_many_plans_read_any_others(case: str, before: Cut, after: Cut, nodes: int) -> None:
    one_reads_the_other(case, before, after, nodes)


def one_reads_the_other(case: str, before: Cut, after: Cut, nodes: int) -> None:
    truth = TRUTHS[case]
    folder = Path(tempfile.mkdtemp())
    try:
        # Every node that wrote is there again, though it may run other ranks.
        roots = [folder / f"node{i}" for i in range(min(nodes, world(truth, after)))]
        save(truth, before, roots)
        restored(truth, after, roots)
    finally:
        shutil.rmtree(folder)


def test_each_element_is_written_once_and_by_several(tmp_path: Path) -> None:
    truth = TRUTHS["moe"]
    save(truth, Cut("tp=2", dp=2), [tmp_path])
    opened = open_folder(tmp_path / "step-7")
    by_rank = [0] * 4
    for piece in opened.saved.pieces:
        by_rank[int(piece.file[-17:-12])] += math.prod(widths(piece.box)) * DTYPES[piece.dtype].itemsize
    assert sum(by_rank) == sum(tensor.nbytes for tensor in truth.tensors.values())
    assert max(by_rank) < 1.2 * min(by_rank)
    assert {name.split("-")[0] for name in opened.saved.hashes.files} == {"model", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(opened.whole(name), tensor) for name, tensor in truth.tensors.items())


def test_a_rank_reads_little_more_than_its_own(tmp_path: Path) -> None:
    big = Truth(4, vocab_size=40000, hidden_size=32, num_experts=2)
    save(big, Cut("pp=1"), [tmp_path])
    _, blocks = held(big, Cut("tp=4"), 1)
    source = LocalFiles(tmp_path / "step-7")
    opened = Checkpoint.open(source)
    assert opened.fill(blocks) == sum(block.tensor.nbytes for block in blocks)
    assert all(big.holds(block) for block in blocks)
    assert source.bytes_read < 0.65 * opened.saved.nbytes, "a quarter is its own, and whole chunks of 1 MiB are hashed"


def test_the_model_alone_is_read_from_it(tmp_path: Path) -> None:
    truth = TRUTHS["moe"]
    save(truth, Cut("pp=2", dp=2, seams=(0.3,)), [tmp_path])
    model, _ = held(truth, Cut("tp=3"), 2)
    blocks = model_blocks(model)
    open_folder(tmp_path / "step-7").fill(blocks)
    assert all(truth.holds(block) for block in blocks)


def test_another_model_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    save(TRUTHS["moe"], Cut("pp=1"), [tmp_path])
    for other, words in (
        (Truth(0, vocab_size=12), "has shape"),
        (Truth(0, num_hidden_layers=5), "has none"),
        (Truth(0, num_hidden_layers=3), "no place for"),
    ):
        _, blocks = held(other, Cut("pp=1"), 0)
        for block in blocks:
            block.tensor.fill_(3.0)
        with pytest.raises(WeightsError, match=words):
            AsyncSaves(tmp_path).restore(blocks)
        assert all(bool((block.tensor == 3).all()) for block in blocks)


def test_a_model_that_is_not_wholly_held_is_not_saved(tmp_path: Path) -> None:
    _, blocks = held(TRUTHS["moe"], Cut("tp=2"), 1)
    with pytest.raises(PlanError, match="held by no rank"):
        AsyncSaves(tmp_path).save(1, blocks, {})


def test_the_dealing_of_equal_holders_is_even() -> None:
    names = [HeldBox(f"t{i}", ((0, 10 + i),), "F32", 4) for i in range(30)]
    shares = assign_shards([names, names, names])
    sizes = [sum(share.box[0][1] for share in of_rank) for of_rank in shares]
    assert sum(sizes) == sum(10 + i for i in range(30))
    assert max(sizes) - min(sizes) <= 40


@settings(max_examples=examples(60))
@given(st.data())
def test_flat_ranges_are_views_of_their_elements(data: st.DataObject) -> None:
    truth = TRUTHS["moe"]
    model, _ = held(truth, Cut("tp=3,shares=1:2:1"), data.draw(st.integers(0, 2)))
    parameters = list(model.parameters())
    parameter = parameters[data.draw(st.integers(0, len(parameters) - 1))]
    count = parameter.numel()
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    from_whole = TensorBlock("", (), torch.arange(count).view(parameter.shape).float())
    full = {}
    for block in flat_blocks(parameter.shard, tuple(parameter.shape), 0, from_whole.tensor.reshape(-1)):
        for at, value in _elements(block):
            assert (block.name, at) not in full
            full[block.name, at] = value
    flat = torch.arange(start, stop).float()
    part = {
        (block.name, at): value
        for block in flat_blocks(parameter.shard, tuple(parameter.shape), start, flat)
        for at, value in _elements(block)
    }
    assert part == {place: value for place, value in full.items() if start <= value < stop}
    for block in flat_blocks(parameter.shard, tuple(parameter.shape), start, flat):
        block.tensor.zero_()
    assert not flat.any(), "to fill a block is to fill the range"


def _elements(block: TensorBlock):  # type: ignore[no-untyped-def]
    corner = [start for start, _ in block.box]
    for at in torch.cartesian_prod(*[torch.arange(n) for n in block.tensor.shape]).view(-1, block.tensor.ndim).tolist():
        yield tuple(a + b for a, b in zip(corner, at, strict=True)), block.tensor[tuple(at)].item()
