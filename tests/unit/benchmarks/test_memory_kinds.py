"""Memory that a live process takes is told by its kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes.memory_kinds import HUGE_PAGES, KINDS, grown, mapped_ranges, memory_kinds

MIB = 1024  # KiB
TAKER = """
import ctypes, mmap, os, sys, threading

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
held = []

def pieces():
    for _ in range(128):
        place = libc.malloc(ctypes.c_size_t(64 * 1024))  # smaller than what glibc maps by itself
        ctypes.memset(place, 1, 64 * 1024)

def touch(room, writes=True):
    for at in range(0, len(room), mmap.PAGESIZE):
        if writes:
            room[at] = 1
        else:
            room[at]
    held.append(room)

def mapped(kind):
    touch(mmap.mmap(-1, 8 << 20, kind))

def of_shared_memory():
    file = os.memfd_create("taken")
    os.ftruncate(file, 8 << 20)
    touch(mmap.mmap(file, 8 << 20))

def of_a_file(path, writes):
    file = os.open(path, os.O_RDWR)
    touch(mmap.mmap(file, 8 << 20, mmap.MAP_PRIVATE), writes)

def in_a_thread(waits=threading.Event()):
    thread = threading.Thread(target=lambda: (pieces(), done.set(), waits.wait()), daemon=True)
    done = threading.Event()
    thread.start()
    done.wait()

print("here", flush=True)
for line in sys.stdin:
    kind, path = line.strip().split(",")
    {
        "heap": pieces,
        "arenas": in_a_thread,
        "anonymous": lambda: mapped(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        "shared memory": of_shared_memory,
        "read of files": lambda: of_a_file(path, False),
        "written of files": lambda: of_a_file(path, True),
    }[kind]()
    print("taken", flush=True)
"""


@pytest.fixture
def taker() -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", TAKER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def test_each_kind_that_a_process_takes_is_told(taker: subprocess.Popen[str], tmp_path: Path) -> None:
    assert taker.stdin is not None
    assert taker.stdout is not None
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 * 2**20))
    for kind in ("heap", "arenas", "anonymous", "shared memory", "read of files", "written of files"):
        before = memory_kinds(taker.pid)
        taker.stdin.write(f"{kind},{file}\n")
        taker.stdin.flush()
        assert taker.stdout.readline() == "taken\n"
        after = memory_kinds(taker.pid)
        changes = {name: after[name] - before[name] for name in KINDS}
        assert abs(changes.pop(kind) - 8 * MIB) < MIB / 4, (kind, before, after)
        assert all(abs(change) < MIB / 4 for change in changes.values()), (kind, changes)
        assert grown(before, after, MIB).startswith(f"{kind} +")


def test_all_kinds_together_are_what_a_process_holds(taker: subprocess.Popen[str]) -> None:
    with open(f"/proc/{taker.pid}/smaps_rollup") as file:
        held = next(int(line.split()[1]) for line in file if line.startswith("Rss:"))
    kinds = memory_kinds(taker.pid)
    assert sum(kinds[name] for name in KINDS) == held
    assert all(kinds[name] for name in ("heap", "anonymous", "stack", "read of files", "written of files")), kinds


def test_huge_pages_are_counted_beside_their_kind() -> None:
    smaps = (
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n"
        "Rss:                4096 kB\nAnonymous:          4096 kB\nAnonHugePages:      2048 kB\nVmFlags: rd wr\n"
        "7f1000000000-7f1000001000 r-xp 00001000 fe:00 26 /usr/lib/of two words.so (deleted)\n"
        "Rss:                   4 kB\nAnonymous:             0 kB\nAnonHugePages:         0 kB\n"
    )
    first, second = mapped_ranges(smaps)
    assert (first.kind, first.counts["Rss"], first.counts["AnonHugePages"]) == ("arenas", 4096, 2048)
    assert (second.name, second.kind) == ("/usr/lib/of two words.so (deleted)", "read of files")
    assert second.stop - second.start == 4096


def test_what_grew_is_told_largest_first() -> None:
    before = dict.fromkeys((*KINDS, HUGE_PAGES), 0) | {"heap": 10240, "stack": 100}
    after = before | {"heap": 8192, "anonymous": 4608, "stack": 120}
    assert grown(before, after, 64) == "anonymous +4.5, heap -2.0 MiB"
    assert grown(before, before, 64) == ""
