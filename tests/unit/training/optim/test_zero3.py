from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads, spec_of
from tests.support.models.slow_load import slow_load
from tests.support.training.training_step import Layout, Rank, close, random_tokens, ranks_of, saved
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.core.errors import PlanError
from tllm.parallel.mesh import whole
from tllm.parallel.replicated import ReplicatedParameters
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.gradients.bucket_layout import LINE, BucketLayout
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.optim.optimizer import AdamW
from tllm.training.optim.sharded_update import OptimizerUpdate
from tllm.training.optim.zero3 import unit_numbers, units_of
from tllm.training.step.model_chunks import build_chunks, parameters_of, without_memory
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import load
from tllm.weights.safetensors_index import Index

SPREAD = Layout(dp=(1, 1), zero=3)
Watch = Callable[[int, int], None]
"""watch(unit, bytes of whole weights), from within a unit's forward pass and once its weights have gradients"""


def watched(rank: Rank, watch: Watch) -> None:
    for number, unit in enumerate(units_of(rank.chunks)):
        unit.last.register_forward_hook(lambda *_, n=number: watch(n, whole_bytes(rank)), prepend=True)
        for parameter in unit.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, n=number: watch(n, whole_bytes(rank)))


def whole_bytes(rank: Rank) -> int:
    return sum(run.untyped_storage().nbytes() for run in rank.update.flat.whole)


def run_steps(ranks: list[Rank], steps: int, microbatches: int = 4) -> None:
    def learn(rank: Rank) -> None:
        for step in range(1, steps + 1):
            rank.step(step, random_tokens(microbatches, step), 1e-2)

    in_threads([partial(learn, rank) for rank in ranks])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_between_steps_is_that_of_the_formula(dtype: torch.dtype, ranks: int, tmp_path: Path) -> None:
    """A rank holds of each bucket as many elements as its range has, of weights, gradients and states."""
    save_model("llama_mha_tied_bias", tmp_path)
    made = ranks_of(tmp_path, replace(SPREAD, dp=(1,) * ranks), dtype)
    run_steps(made, 1, ranks)
    state = 8 if dtype == torch.float32 else 12
    total = sum(p.numel() for p in made[0].parameters)
    for place, rank in enumerate(made):
        mine = sum(bucket.counts(ranks)[place] for bucket in rank.buckets.layout.buckets)
        assert abs(mine - total / ranks) <= LINE * len(rank.buckets.layout.buckets)
        assert rank.update.flat.nbytes == mine * dtype.itemsize
        assert rank.buckets.nbytes == mine * 4
        assert rank.update.nbytes == mine * state
    close(made)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", ["llama", "llama_mha_tied_bias"])
def test_two_units_at_most_are_whole_at_once(case: str, order: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    ranks = ranks_of(tmp_path, replace(SPREAD, order=order), torch.float32)
    seen: list[tuple[int, int]] = []
    watched(ranks[0], lambda unit, nbytes: seen.append((unit, nbytes)))
    run_steps(ranks, 2)
    units = units_of(ranks[0].chunks)
    sizes = [sum(p.nbytes for p in {id(p): p for p in unit.parameters()}.values()) for unit in units]
    tied = sizes[0] if case != "llama" else 0
    pairs = [sizes[n] + max(sizes[n - 1 : n] + sizes[n + 1 : n + 2]) for n in range(len(sizes))]
    for unit, nbytes in seen:
        assert nbytes <= pairs[unit] + tied * (0 < unit < len(sizes) - 1), f"unit {unit}"
    middle = 2
    assert max(nbytes for unit, nbytes in seen if unit == middle) == 2 * sizes[middle], "the next one comes ahead"
    assert max(nbytes for _, nbytes in seen) < sum(sizes)
    assert whole_bytes(ranks[0]) == 0, "nothing stays when the step is over"
    close(ranks)


def test_what_comes_next_is_gathered_ahead_and_nothing_twice(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    ranks = ranks_of(tmp_path, SPREAD, torch.float32)
    events: list[tuple[str, int]] = []
    gathering = ranks[0].gathering
    take, let_go = gathering.flat.allocate, gathering.flat.free
    gathering.flat.allocate = lambda n: (events.append(("take", n)), take(n))[1]  # type: ignore[func-returns-value, method-assign]
    gathering.flat.free = lambda n: (events.append(("let go", n)), let_go(n))[1]  # type: ignore[func-returns-value, method-assign]
    run_steps(ranks, 1, microbatches=2)
    first, events[:] = events[:], []
    run_steps(ranks, 1, microbatches=2)
    units = gathering._of
    takes = [n for what, n in events if what == "take"]
    forward = [n for of in units for n in of]
    backward = [n for of in reversed(units[1:-1]) for n in of]  # the table is not read, and the head is still there
    assert takes == forward + backward
    assert len(first) == len(events) + 2 * len(units[-1]), "the first step does not know that the head comes again"
    for of, then in pairwise(units):
        assert events.index(("take", then[0])) < events.index(("let go", of[0]))
    run_steps(ranks, 1, microbatches=4)  # which is in no other order, and longer
    run_steps(ranks, 1, microbatches=2)
    assert whole_bytes(ranks[0]) == 0, "nothing was gathered that a shorter step does not use"
    close(ranks)


def test_unlike_numbers_of_microbatches_are_refused_on_every_rank(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    ranks = ranks_of(tmp_path, replace(SPREAD, dp=(3, 1)), torch.float32)

    def refused(rank: Rank) -> str:
        with pytest.raises(PlanError) as caught:
            rank.gradients(random_tokens(4))
        return caught.value.message

    messages = in_threads([partial(refused, rank) for rank in ranks])
    assert len(set(messages)) == 1 and "all 2 ranks of dp" in messages[0] and "3, 1 microbatches" in messages[0]
    close(ranks)


def test_between_steps_the_model_can_be_asked(tmp_path: Path) -> None:
    """As for a loss over held-out text; every rank asks, and a step that follows is as if none had."""
    save_model("llama", tmp_path)
    tokens = random_tokens(1)[0]

    def ask(rank: Rank) -> torch.Tensor:
        model = rank.chunks[0]
        with torch.no_grad():
            x_TD = model(tokens.ids_T, tokens.positions_T, TrainAttend(model.attention_specs(), tokens))
            return model.logits(x_TD)

    plain, spread = ranks_of(tmp_path, Layout(dp=(1, 1)), torch.float32), ranks_of(tmp_path, SPREAD, torch.float32)
    for ranks in (plain, spread):
        run_steps(ranks, 2)
    want = in_threads([partial(ask, rank) for rank in plain])
    got = in_threads([partial(ask, rank) for rank in spread])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert whole_bytes(spread[0]) == 0
    run_steps(spread, 1)
    close(plain + spread)


def hollow(folder: Path, dp: Group) -> tuple[list[nn.Parameter], OptimizerUpdate]:
    """A model of which no rank ever had the whole."""
    spec = spec_of(folder)
    chunks = build_chunks(spec, whole(spec), [range(spec.num_layers)], torch.bfloat16, "meta")
    without_memory(chunks[0])
    parameters = parameters_of(chunks)
    units = unit_numbers(units_of(chunks), parameters)
    buckets = GradientBuckets(
        BucketLayout(parameters, GradientGroups(dp), 3, 4096, units=units), ReplicatedParameters(parameters, solo())
    )
    buckets.close()
    return parameters, OptimizerUpdate(buckets, AdamW())


def test_weights_are_read_a_bucket_at_a_time(tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path)
    source = LocalFiles(tmp_path)
    index = Index.read(source)
    updates = [hollow(tmp_path, dp)[1] for dp in local_groups(3, name="dp")]
    for update in updates:
        assert update.flat.nbytes == sum(mine.nbytes for mine in update.flat.mine)
        seen: list[int] = []

        def fill(part: nn.Module, update: OptimizerUpdate = update, seen: list[int] = seen) -> None:
            load(part, index, source)
            seen.append(sum(run.untyped_storage().nbytes() for run in update.flat.whole))

        update.fill(fill)
        assert max(seen) == max(run.numel() * run.itemsize for run in update.flat.whole)
    blocks = [block for update in updates for block in update.blocks()]
    for name, tensor in saved(tmp_path).items():
        for state, dtype in (("", torch.bfloat16), ("float32/", torch.float32)):
            got = torch.full(tensor.shape, torch.nan, dtype=dtype)
            for block in blocks:
                if block.name == state + name:
                    got[tuple(slice(a, b) for a, b in block.box)] = block.tensor
            assert torch.equal(got, tensor.to(torch.bfloat16).to(dtype)), state + name


def test_filling_does_the_same_for_weights_that_are_whole(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    ranks = ranks_of(tmp_path, Layout(), torch.float32)
    for parameter in ranks[0].parameters:
        parameter.data.fill_(torch.nan)
    ranks[0].update.fill(lambda part: slow_load(part, tmp_path))
    blocks = {block.name: block.tensor for block in ranks[0].update.blocks()}
    assert all(torch.equal(blocks[name], tensor) for name, tensor in saved(tmp_path).items())
    close(ranks)


def test_a_unit_shares_no_bucket_with_another(tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path)
    (rank,) = ranks_of(tmp_path, replace(SPREAD, dp=(1,)), torch.float32)
    numbers = unit_numbers(units_of(rank.chunks), rank.parameters)
    assert sorted(set(numbers)) == list(range(6)), "two ends and four layers"
    for bucket in rank.buckets.layout.buckets:
        assert len({numbers[index] for index in bucket.parameters}) == 1
