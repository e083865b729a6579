"""Training with servers that hold weights and state: synchronous it is data parallel, by whatever rows it pulls."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parity.recovery.test_resume import part_of_run
from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.selection import covering, soak_but
from tests.support.training.parameter_servers import Replica, Served, served, train_served
from tests.support.training.training_step import (
    Layout,
    Named,
    close,
    furthest,
    gather,
    random_tokens,
    ranks_of,
    saved,
    train_under,
)
from tllm.comm.collectives.group import local_groups
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.optim.optimizer import SGD, AdamW
from tllm.training.parameter_server.stale_synchronous import ASYNCHRONOUS
from tllm.training.state.tensor_blocks import TensorBlock

SHAPES = [((1, 1), 2), ((1, 2, 2), 3), ((1,) * 7, 1)]
"""Replicas' shares and servers; of seven replicas at least two get none of five microbatches."""
STEPS, STOP = 4, 2


MODELS = {"untied": ("llama", 0.0), "untied_clipped": ("llama", 0.5), "tied_clipped": ("llama_mha_tied_bias", 0.5)}


@pytest.mark.parametrize(("shape", "model"), covering(SHAPES, MODELS))
def test_synchronous_is_data_parallel(shape: tuple[tuple[int, ...], int], model: str, tmp_path: Path) -> None:
    (shares, servers), (case, clip) = shape, MODELS[model]
    save_model(case, tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(5, seed) for seed in range(3)]
    options = dict(optimizer=AdamW(), weight_decay=0.1)
    layout = Layout(dp=shares)
    want = train_under(tmp_path, layout, batches, torch.float64, shapes, 1e-2, clip=clip or None, **options)
    got = train_served(tmp_path, shares, servers, batches, torch.float64, shapes, 1e-2, clip=clip, **options)
    assert want[1][0] > 1.0, "where there is a limit, it is met"
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(got[1], want[1], rtol=1e-12, atol=0)
    off, name = furthest(got[2], want[2])
    assert off < 1e-12, f"{shares} over {servers}: {name} is off by {off}"


@pytest.mark.parametrize(
    ("shape", "dtype", "optimizer"),
    covering(SHAPES[1:], [torch.float32, torch.bfloat16], [AdamW(), SGD(nesterov=True)]),
)
def test_without_a_limit_it_is_data_parallel_to_the_bit(
    shape: tuple[tuple[int, ...], int], dtype: torch.dtype, optimizer: AdamW | SGD, tmp_path: Path
) -> None:
    save_model("llama", tmp_path)
    (shares, servers), options = shape, dict(optimizer=optimizer, weight_decay=0.1)
    shapes, batches = saved(tmp_path), [random_tokens(5, seed) for seed in range(3)]
    want = train_under(tmp_path, Layout(dp=shares), batches, dtype, shapes, 1e-2, **options)
    got = train_served(tmp_path, shares, servers, batches, dtype, shapes, 1e-2, **options)
    assert got[0] == want[0]
    assert all(torch.equal(got[2][name], want[2][name]) for name in want[2])


def test_float32_with_a_limit_differs_by_the_rounding_of_the_norm(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(5, seed) for seed in range(3)]
    options = dict(optimizer=SGD(), clip=0.5)
    want = train_under(tmp_path, Layout(dp=(1, 1)), batches, torch.float32, shapes, 1e-2, **options)
    got = train_served(tmp_path, (1, 1), 2, batches, torch.float32, shapes, 1e-2, **options)
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0)
    assert furthest(got[2], want[2])[0] < 1e-6


@pytest.mark.parametrize("max_staleness", soak_but([1], [1, ASYNCHRONOUS]))
def test_without_waiting_it_still_learns(max_staleness: int, tmp_path: Path) -> None:
    """The same rows over and over: whatever the order in which gradients come, the loss falls as far as in step."""
    save_model("llama", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(4)] * 12
    options = dict(optimizer=SGD(momentum=0.0))
    together = train_served(tmp_path, (1, 1), 1, batches, torch.float32, shapes, 0.3, **options)[0]
    alone = train_served(
        tmp_path, (1, 1), 2, batches, torch.float32, shapes, 0.15, **options, max_staleness=max_staleness
    )[0]
    assert together[-1] < 0.8 * together[0], together
    assert abs(alone[-1] - together[-1]) < 0.1 * together[0], (alone, together)


def with_servers(folder: Path, root: Path, steps: range, dtype: torch.dtype) -> Served:
    """Part of a run by three replicas and two servers, which hold all that a save takes."""
    ranks = served(folder, (1, 2, 1), 2, dtype, weight_decay=0.1, clip=1.0)
    groups = local_groups(5, name="save")

    def opened(rank: int, blocks: list[TensorBlock]) -> AsyncSaves:
        checkpoints = AsyncSaves(root, groups[rank])
        if checkpoints.latest is not None:
            assert checkpoints.restore(blocks).step == steps.start
        return checkpoints

    def write(checkpoints: AsyncSaves, step: int, blocks: list[TensorBlock]) -> None:
        checkpoints.save(step, blocks, {})
        assert [result.error for result in checkpoints.wait()] == [""]
        checkpoints.close()

    def learn(replica: Replica) -> None:
        checkpoints, replica.update.step = opened(replica.number, []), steps.start
        if replica.number == 0 and not steps.start:
            replica.update.give()
        for step in steps:
            replica.step(random_tokens(5, step), 1e-2)
        assert replica.update.save() == steps.stop
        write(checkpoints, steps.stop, [])
        replica.update.close()

    def serve(number: int) -> None:
        server = ranks.servers[number]
        checkpoints = opened(3 + number, server.state.blocks())
        if steps.start:
            server.resume(steps.start, steps.start)
        server.run(lambda step: write(checkpoints, step, server.state.blocks()))

    in_threads([*(partial(learn, replica) for replica in ranks.replicas), *(partial(serve, s) for s in range(2))])
    return ranks


@pytest.mark.parametrize(("servers_first", "dtype"), covering([True, False], [torch.float64, torch.bfloat16]))
def test_a_save_goes_on_with_servers_and_without(servers_first: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    shapes, root, layout = saved(tmp_path), tmp_path / "run", Layout(dp=(2, 1), zero=1)
    options = dict(weight_decay=0.1, clip=1.0)
    batches = [random_tokens(5, step) for step in range(STEPS)]
    want = train_under(tmp_path, Layout(), batches, dtype, shapes, 1e-2, **options)[2]

    def without_servers(steps: range) -> Named:
        ranks = ranks_of(tmp_path, layout, dtype, **options)
        groups = local_groups(len(ranks), name="save")
        in_threads([partial(part_of_run, *pair, root, steps) for pair in zip(ranks, groups, strict=True)])
        close(ranks)
        return gather(ranks, lambda rank, index: rank.parameters[index], shapes)

    if servers_first:
        with_servers(tmp_path, root, range(STOP), dtype)
        got = without_servers(range(STOP, STEPS))
    else:
        without_servers(range(STOP))
        got = with_servers(tmp_path, root, range(STOP, STEPS), dtype).saved(shapes)
    off, name = furthest(got, want)
    assert off < (1e-12 if dtype == torch.float64 else 1e-3), f"{name} is off by {off}"
