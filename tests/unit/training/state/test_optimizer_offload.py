from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import local_groups, solo
from tllm.core.errors import CapacityError, ConfigError
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.optim.flat_parameters import memory_layout
from tllm.training.optim.optimizer import SGD, AdamW, Optimizer
from tllm.training.optim.sharded_update import OptimizerUpdate
from tllm.training.state.optimizer_offload import OnDevice, OnDisk, OnHost, StatePlacement
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.state.train_state import FlatMemory

WIDTH = 40_000
"""Elements of a parameter: several pages, and not whole ones."""


def buckets_of(dtype: torch.dtype, count: int = 3) -> GradientBuckets:
    """Each parameter is a bucket of its own."""
    dice = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        parameter = cut_parameter((WIDTH + number,), Shard((ShardPiece(f"p{number}"),)))
        parameter.data = torch.randn(WIDTH + number, generator=dice).to(dtype)
        made.append(parameter.requires_grad_())
    return GradientBuckets(
        BucketLayout(made, GradientGroups(solo()), bucket_bytes=1), ReplicatedParameters(made, solo())
    )


def learn(update: OptimizerUpdate, steps: int) -> None:
    parameters: list[nn.Parameter] = update.buckets.layout.parameters
    for step in range(1, steps + 1):
        update.buckets.begin(1)
        sum((p.float() * torch.linspace(-step, 1, p.numel())).sum() for p in parameters).backward()  # type: ignore[union-attr]
        update.buckets.finish()
        update.apply(step, 1e-2)


def trained(place: StatePlacement, rule: Optimizer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights and states after a few steps."""
    update = OptimizerUpdate(buckets_of(dtype), rule, 0.1, place)
    learn(update, 4)
    return {block.name: block.tensor.clone() for block in update.blocks()}


def resident(folder: Path) -> int:
    """Bytes in this process's memory of the files of a folder that it has mapped."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            inside = f"{folder}/" in line
        elif word == "Rss:" and inside:
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", [AdamW(), SGD(nesterov=True)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("place", [lambda folder: OnHost(), OnDisk], ids=["host", "disk"])
def test_every_place_has_the_same_bits(
    place: Callable[[Path], StatePlacement], rule: Optimizer, dtype: torch.dtype, tmp_path: Path
) -> None:
    want, got = trained(OnDevice(), rule, dtype), trained(place(tmp_path), rule, dtype)
    assert got.keys() == want.keys() and any(name.startswith(rule.states[0]) for name in got)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert all(bool(tensor.any()) for tensor in want.values())


class Watched:
    """Notes what is in memory of a folder's files while a bucket is updated, and how large the bucket's states are."""

    states = AdamW.states

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[tuple[int, int]]()

    def update(
        self, weights: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step: int, rate: float, decay: float
    ) -> None:
        AdamW().update(weights, gradient, state, step, rate, decay)
        self.seen.append((resident(self.folder), sum(x.nbytes for x in state.values())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_one_bucket_is_in_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    rule = Watched(tmp_path)
    update = OptimizerUpdate(buckets_of(dtype), rule, 0.0, OnDisk(tmp_path))
    assert resident(tmp_path) == 0, "wide weights that were written at the start are out of memory too"
    learn(update, 2)
    assert resident(tmp_path) == 0
    assert len(rule.seen) == 6
    for now, states in rule.seen:
        assert states <= now <= states + 3 * mmap.PAGESIZE
    assert update.nbytes == sum(states for _, states in rule.seen[:3])


def mapped(folder: Path) -> list[int]:
    """Bytes of each piece of this process's addresses that is a file of a folder."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if f"{folder}/" in line]
    return [int(stop, 16) - int(start, 16) for start, stop in ranges]


def test_the_disk_gives_the_room_of_all_states_at_once_and_has_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, taken = mmap.mmap, list[tuple[int, int]]()

    def spy(descriptor: int, size: int) -> mmap.mmap:
        taken.append((os.fstat(descriptor).st_blocks * 512, size))
        return inner(descriptor, size)

    monkeypatch.setattr(mmap, "mmap", spy)
    update = OptimizerUpdate(buckets_of(torch.float32), AdamW(), 0.0, OnDisk(tmp_path))
    assert len(taken) == 3 and sum(size for _, size in taken) >= update.nbytes
    assert all(blocks >= size for blocks, size in taken), "no page can lack room later"
    assert len(mapped(tmp_path)) == 3 and list(tmp_path.iterdir()) == [], "no end of the process leaves a file"
    update.close()
    assert mapped(tmp_path) == []


def test_a_full_disk_is_an_error_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"iB free and the optimizer's states need .*B more: No space left"):
        OptimizerUpdate(buckets_of(torch.float32), AdamW(), 0.0, OnDisk(tmp_path))


def test_a_disk_that_fails_later_ends_the_step(tmp_path: Path) -> None:
    update = OptimizerUpdate(buckets_of(torch.float32), AdamW(), 0.0, OnDisk(tmp_path))
    update.states[1]._file = _Failing()  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match="did not take the optimizer's states: Input/output error"):
        learn(update, 1)


class _Failing:
    def madvise(self, how: int) -> None: ...

    def flush(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep the optimizer's states in"):
        OnDisk(tmp_path / "file")


def test_files_may_be_more_than_the_system_lets_a_process_open_at_first(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        place = OnDisk(tmp_path)
        kept = [place.keep(("exp_avg",), 4, torch.float32, torch.device("cpu")) for _ in range(few)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == few


def test_ranges_of_nothing_need_no_file(tmp_path: Path) -> None:
    """More ranks than elements: some keep none."""
    kept = OnDisk(tmp_path).keep(["exp_avg"], 0, torch.float32, torch.device("cpu"))
    with kept as state:
        assert state["exp_avg"].numel() == 0
    assert mapped(tmp_path) == []


def test_copies_of_a_save_lie_where_states_do(tmp_path: Path) -> None:
    """The files are those of copies in memory, and copies on a disk are in memory only while they are written."""
    tensor = torch.arange(2.0**22)
    block = TensorBlock("p", ((0, len(tensor)),), tensor)
    copies = tmp_path / "copies"
    for name, place in (("near", OnDevice()), ("far", OnDisk(copies))):
        with closing(AsyncSaves(tmp_path / name, place=place)) as saves:
            saves.save(1, [block], {})
            saves.wait()
            assert sum(mapped(copies)) == (tensor.nbytes if name == "far" else 0)
            assert resident(copies) == 0
    first, second = (sorted((tmp_path / name / "step-1").iterdir()) for name in ("near", "far"))
    assert [one.name for one in first] == [one.name for one in second]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True) if a.suffix != ".json")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_goes_on_in_the_memory_of_one_that_was_laid_out_the_same(dtype: torch.dtype) -> None:
    """To the bit, also where the float32 weights say more than those of the model."""
    first = OptimizerUpdate(buckets_of(dtype), AdamW())
    learn(first, 2)
    kept, begun = first.memory, first.memory.begun
    first.close()
    again = OptimizerUpdate(buckets_of(dtype), AdamW(), kept=kept)
    assert again.memory is kept and kept.begun == begun, "nothing was written"
    assert all(one is run for one, run in zip(again.flat.whole, kept.weights, strict=True))
    whole = OptimizerUpdate(buckets_of(dtype), AdamW())
    learn(whole, 2)
    for update in (again, whole):
        update.buckets.begin(1)
        sum(p.float().square().sum() for p in update.buckets.layout.parameters).backward()  # type: ignore[union-attr]
        update.buckets.finish()
        update.apply(3, 1e-2)
    third = OptimizerUpdate(buckets_of(dtype), AdamW(), kept=again.memory)  # after another loss
    for update in (again, third):
        for a, b in zip(update.blocks(), whole.blocks(), strict=True):
            assert a.name == b.name and torch.equal(a.tensor, b.tensor)
    for other in (buckets_of(dtype, 2), buckets_of(torch.float64)):
        assert OptimizerUpdate(other, AdamW(), kept=kept).memory is not kept, "other tensors, or of another dtype"
    assert OptimizerUpdate(buckets_of(dtype), SGD(), kept=kept).memory is not kept
    again.fill(lambda module: None)
    assert kept.begun == begun + 2, "a fill begins to change it too"


def test_memory_of_other_ranges_is_not_gone_on_in() -> None:
    """A rank that takes another's place among the replicas keeps other ranges of the states (ZeRO)."""
    parameters = buckets_of(torch.float32).layout.parameters
    first, second = (
        memory_layout(BucketLayout(parameters, GradientGroups(dp), zero=1), AdamW.states) for dp in local_groups(2)
    )
    assert first != second and FlatMemory(first).fits(first) and not FlatMemory(first).fits(second)
