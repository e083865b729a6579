"""Sums in memory that ranks share, beside `fold`: their bits, ranks that are late, and ranks that never come."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tests.support.models.few_bits import libraries
from tllm.comm.collectives.fold import fold
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.links import shared_memory
from tllm.comm.links.shared_memory import PLACE_BYTES, PREFIX, SharedMemory, bytes_of, meet_in_memory
from tllm.core.errors import FrameError, LinkClosed, LinkTimeout
from tllm.kernels.library import Library, library
from tllm.kernels.recording.held_memory import HeldMemory
from tllm.kernels.recording.host_steps import host_step
from tllm.kernels.recording.recorder import Recorder, Recording
from tllm.kernels.recording.shared_sums import SPIN_SECONDS, SUMMED, SharedSums
from tllm.parallel.collectives import reduce_from, sum_in_memory

EACH_LIBRARY = pytest.mark.parametrize("kernels", libraries(), ids=lambda one: one.instruction_set.name)
COUNTS = (1, 15, 16, 2048, 3 * PLACE_BYTES // 8 + 5)
"""Numbers of a tensor: the last take several pieces, in each dtype."""

LATE = 10 * SPIN_SECONDS
"""What a rank sleeps so that the others wait for it outside of the kernel, too."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory of this test's own: in the one above it files of tests beside it come and go."""
    with tempfile.TemporaryDirectory(prefix="tllm-test-", dir=shared_memory.FOLDER) as own:
        monkeypatch.setattr(shared_memory, "FOLDER", Path(own))
        yield Path(own)


def joined(groups: Sequence[Group], kernels: Library | None = None, seconds: float = 20.0) -> list[SharedSums]:
    kernels = kernels or library()
    assert kernels is not None

    def join(group: Group) -> SharedSums:
        memory = meet_in_memory(group.rank, group.send, group.recv, True, seconds)
        assert memory is not None
        return SharedSums(kernels, memory)

    return run_ranks(groups, join)


def parts(ranks: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank has: numbers of many sizes, so that the order of a sum shows."""
    made = torch.Generator().manual_seed(count)
    scales = 10.0 ** torch.randint(-4, 5, (ranks, count), generator=made)
    return list((torch.randn(ranks, count, dtype=torch.float64, generator=made) * scales).to(dtype))


def folded(pieces: Sequence[Tensor]) -> Tensor:
    copies = [piece.clone() for piece in pieces]
    fold(copies, copies[0])
    return copies[0]


@EACH_LIBRARY
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_have_the_bits_of_those_by_links(kernels: Library, ranks: int, folder: Path) -> None:
    groups = local_groups(ranks)
    sums = joined(groups, kernels)
    cases = [parts(ranks, count, dtype) for dtype in SUMMED for count in COUNTS]
    found = run_ranks(groups, lambda group: [sums[group.rank](case[group.rank].clone()) for case in cases])
    for of_rank in found:
        for x, case in zip(of_rank, cases, strict=True):
            torch.testing.assert_close(x, folded(case), rtol=0, atol=0)
    assert not list(folder.iterdir()), "the file is gone once all have opened it"


def test_a_tensor_that_lies_apart_is_summed_where_it_lies() -> None:
    groups = local_groups(2)
    sums = joined(groups)
    both = [torch.arange(12.0).view(3, 4) * (1 + rank) for rank in range(2)]
    run_ranks(groups, lambda group: sums[group.rank](both[group.rank].t()))
    for x in both:
        assert torch.equal(x, torch.arange(12.0).view(3, 4) * 3)


def test_a_group_sums_in_memory_and_counts_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank comes when the first waits for it, and counts nothing of what was before it came."""
    groups = local_groups(2)
    said = run_ranks(groups, lambda group: sum_in_memory(group, ["here", "here"], True, 20.0))
    assert said == ["tp: sums in memory that 2 ranks share"] * 2
    waits, wait = threading.Event(), SharedMemory.wait

    def waited_for(memory: SharedMemory, number: int, piece: int) -> None:
        waits.set()
        wait(memory, number, piece)

    monkeypatch.setattr(SharedMemory, "wait", waited_for)

    def work(group: Group) -> tuple[float, float, int]:
        begun = group.send[1 - group.rank].bytes_moved
        if group.rank == 1:
            assert waits.wait(20)
            time.sleep(LATE)
        came = time.perf_counter()
        x = group.all_reduce(torch.ones(3)) + reduce_from(torch.ones(3), group)
        took, seconds, moved = time.perf_counter() - came, group.seconds, group.send[1 - group.rank].bytes_moved - begun
        assert group.all_reduce(torch.tensor([group.rank, 1]), "max").tolist() == [1, 1]  # none of these sums
        assert torch.equal(x, torch.full((3,), 4.0))
        return seconds, took, moved

    for rank, (seconds, took, moved) in enumerate(run_ranks(groups, work)):
        assert moved == 0 and (LATE if rank == 0 else 0.0) < seconds < took


@pytest.mark.parametrize(
    ("hosts", "able", "said"),
    [
        (["here", "there"], [True, True], ""),
        (["here", "here"], [False, True], "tp: sums by links, as its ranks share no memory"),
        (["here", "here"], [True, False], "tp: sums by links, as its ranks share no memory"),
    ],
)
def test_sums_go_by_links_where_a_rank_shares_no_memory(
    hosts: list[str], able: list[bool], said: str, folder: Path
) -> None:
    groups = local_groups(2)
    assert run_ranks(groups, lambda group: sum_in_memory(group, hosts, able[group.rank], 5.0)) == [said] * 2
    assert all(group.memory_sums is None for group in groups)
    assert not list(folder.iterdir())
    for x in run_ranks(groups, lambda group: group.all_reduce(torch.ones(2))):
        assert torch.equal(x, torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("name", "mode", "owner", "is_taken"),
    [
        (f"{PREFIX}{'0' * 32}", 0o600, os.getuid(), True),
        (f"{PREFIX}{'0' * 32}", 0o644, os.getuid(), False),
        (f"{PREFIX}{'0' * 32}", 0o600, os.getuid() + 1, False),
        ("../elsewhere", 0o600, os.getuid(), False),
    ],
    ids=["as it is made", "open to others", "of another user", "outside of the folder"],
)
def test_only_a_file_of_this_user_alone_is_taken(
    name: str, mode: int, owner: int, is_taken: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever name the first rank tells. Each of these files is as long as one that it makes."""
    (inner := folder / "inner").mkdir()
    monkeypatch.setattr(shared_memory, "FOLDER", inner)
    (path := inner / name).write_bytes(bytes(bytes_of(2)))
    path.chmod(mode)
    monkeypatch.setattr(shared_memory, "_made", lambda ranks: name)
    monkeypatch.setattr(os, "getuid", lambda: owner)
    groups = local_groups(2)
    found = run_ranks(groups, lambda g: meet_in_memory(g.rank, g.send, g.recv, True, 5.0))
    assert [memory is not None for memory in found] == [is_taken] * 2
    assert not path.exists()


def test_a_full_folder_is_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    groups = local_groups(2)
    assert run_ranks(groups, lambda g: meet_in_memory(g.rank, g.send, g.recv, True, 5.0)) == [None, None]
    assert not list(folder.iterdir())


def failing(work: Callable[[Group, SharedSums], object], seconds: float) -> list[Exception | None]:
    """What ends each of two ranks."""
    groups = local_groups(2)
    sums = joined(groups, seconds=seconds)

    def end(group: Group) -> Exception | None:
        try:
            work(group, sums[group.rank])
        except (LinkClosed, LinkTimeout, FrameError) as error:
            return error
        return None

    return run_ranks(groups, end)


def test_a_rank_that_is_lost_ends_the_sum() -> None:
    def work(group: Group, sums: SharedSums) -> None:
        sums(torch.ones(4))
        if group.rank == 1:
            time.sleep(LATE)
            group.close()
        else:
            sums(torch.ones(4))

    lost, none = failing(work, 20.0)
    assert isinstance(lost, LinkClosed) and "rank 1 went away while rank 0 waited for piece 2 of a sum" in str(lost)
    assert none is None


def test_a_rank_that_does_not_come_is_late_at_the_deadline() -> None:
    late, none = failing(lambda group, sums: sums(torch.ones(4)) if group.rank == 0 else None, 0.05)
    assert isinstance(late, LinkTimeout) and "rank 1 sent nothing to rank 0 within 0.05 s" in str(late)
    assert none is None


def test_who_comes_when_it_is_not_waited_for_any_more_finds_out() -> None:
    kernels, has_left = library(), threading.Event()
    assert kernels is not None

    def work(group: Group) -> None:
        memory = meet_in_memory(group.rank, group.send, group.recv, True, 20.0 if group.rank else 0.05)
        assert memory is not None
        sums = SharedSums(kernels, memory)
        if group.rank:
            assert has_left.wait(20)
            sums(torch.ones(4))  # rank 0 is there
        with pytest.raises(LinkClosed if group.rank else LinkTimeout):
            sums(torch.ones(4))
        has_left.set()

    run_ranks(local_groups(2), work)


def test_ranks_that_sum_other_tensors_are_refused() -> None:
    found = failing(lambda group, sums: sums(torch.ones(4 + group.rank)), 20.0)
    assert [type(error) for error in found] == [FrameError, FrameError]
    assert "rank 1 sent rank 0 5 numbers of kind 0 to sum; the plan says piece 1 of 4 numbers" in str(found[0])
    found = failing(lambda group, sums: sums(torch.ones(4, dtype=SUMMED[group.rank])), 20.0)
    assert [type(error) for error in found] == [FrameError, FrameError]


@torch.inference_mode()
def recorded(kernels: Library, step: SharedSums, x: Tensor) -> tuple[Recording, Tensor]:
    """(x + x) summed over ranks, twice, and x added between."""
    recorder = Recorder(kernels, HeldMemory())
    with recorder.recording():
        y = host_step(step, x + x)
        out = host_step(step, y + x)
    recording = recorder.recorded()
    assert recording is not None, recorder.refused
    return recording, out


def test_sums_are_played_and_late_ranks_waited_for() -> None:
    kernels = library()
    assert kernels is not None
    groups = local_groups(2)
    sums = joined(groups)

    def work(group: Group) -> list[Tensor]:
        x = torch.ones(2, 40)
        recording, out = recorded(kernels, sums[group.rank], x)
        assert len(recording) == 4
        found = [out.clone()]
        for turn in range(1, 4):
            time.sleep(LATE * (turn % 2 == group.rank))
            x.fill_(turn + group.rank)
            recording.play()
            found.append(out.clone())
        return found

    for found in run_ranks(groups, work):
        for turn, x in enumerate(found):
            mine, other = (1.0, 1.0) if turn == 0 else (float(turn), turn + 1.0)
            total = 2 * mine + 2 * other
            assert torch.equal(x, torch.full((2, 40), 2 * total + mine + other))


def test_nothing_is_summed_or_played_after_a_sum_that_was_given_up() -> None:
    """Else the other rank, when it comes, would be given the earlier sum's numbers in the place of others."""
    kernels = library()
    assert kernels is not None
    groups = local_groups(2)

    def work(group: Group) -> None:
        memory = meet_in_memory(group.rank, group.send, group.recv, True, 20.0)
        assert memory is not None
        mine = SharedSums(kernels, memory)
        recording, _ = recorded(kernels, mine, torch.ones(2, 40))
        memory.deadline = 0.05
        if group.rank == 0:
            with pytest.raises(LinkTimeout):
                recording.play()
            with pytest.raises(LinkClosed, match="rank 0 gave up piece 3 of a sum"):
                recording.play()
            with pytest.raises(LinkClosed, match="rank 0 gave up piece 3 of a sum"):
                mine(torch.full((2, 40), 7.0))

    run_ranks(groups, work)
