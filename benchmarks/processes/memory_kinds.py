"""What kinds of memory a process holds (Linux): where one has grown, the kind says who can have asked for it.

- heap: small and middling pieces of the C library, of the main thread. Tensors of up to 32 MiB lie here in a server.
- arenas: the same, of other threads (glibc gives them heaps of their own, at multiples of 64 MiB).
- anonymous: mapped by themselves: longer pieces, Python's objects, stacks of threads, instructions made by libraries.
- stack: of the main thread.
- read of files: pages of libraries and of mapped files, as they are on disk. They come when they are first touched.
- written of files: pages of libraries that were written to, which every process has of its own.
- shared memory: between processes, as links of one machine have it.

Huge pages are counted in their kinds and, once more, beside them: one that comes for a single byte adds 2 MiB, and
Linux also makes one by itself of a range that was in use here and there only (khugepaged).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

KINDS = ("heap", "arenas", "anonymous", "stack", "read of files", "written of files", "shared memory")
HUGE_PAGES = "huge pages"
ARENA_BYTES = 64 * 2**20
"""glibc's HEAP_MAX_SIZE: of an arena of a thread, where its heaps begin and how long they may get."""

SHARED = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV", "[anon_shmem")
"""Beginnings of the names of mappings that processes share."""


class MappedRange(NamedTuple):
    """One mapping of a process: addresses [start, stop), the name of what is mapped, and what Linux counts, in KiB."""

    start: int
    stop: int
    name: str
    counts: Mapping[str, int]

    @property
    def kind(self) -> str:
        """Which of `KINDS` its anonymous pages are; those of a file as well, if none was written to."""
        if self.name.startswith(SHARED):
            return "shared memory"
        if self.name in ("[heap]", "[stack]"):
            return self.name[1:-1]
        if self.name.startswith("/"):
            return "read of files"
        is_arena = self.start % ARENA_BYTES == 0 and self.stop - self.start <= ARENA_BYTES
        return "arenas" if is_arena else "anonymous"


def memory_kinds(pid: int) -> dict[str, int]:
    """KiB that a process holds of each of `KINDS`, which add up to all that it holds, and its huge pages."""
    found = Counter(dict.fromkeys((*KINDS, HUGE_PAGES), 0))
    for one in mapped_ranges(Path(f"/proc/{pid}/smaps").read_text()):
        written = one.counts["Anonymous"] if one.kind == "read of files" else 0
        found["written of files"] += written
        found[one.kind] += one.counts["Rss"] - written
        found[HUGE_PAGES] += one.counts["AnonHugePages"]
    return dict(found)


def mapped_ranges(smaps: str) -> Iterator[MappedRange]:
    """The mappings that a text of /proc/PID/smaps tells of."""
    header, counts = list[str](), dict[str, int]()
    for line in smaps.splitlines():
        words = line.split(maxsplit=5)
        if words[0].endswith(":"):
            if words[-1] == "kB":
                counts[words[0][:-1]] = int(words[1])
            continue
        if header:
            yield _range(header, counts)
        header, counts = words, {}
    if header:
        yield _range(header, counts)


def _range(header: list[str], counts: Mapping[str, int]) -> MappedRange:
    start, stop = (int(address, 16) for address in header[0].split("-"))
    return MappedRange(start, stop, header[5] if len(header) > 5 else "", counts)


def grown(before: Mapping[str, int], after: Mapping[str, int], least: int) -> str:
    """Which kinds grew or shrank by so many KiB at least, the largest change first: "heap +4.4, anonymous -1.0 MiB".
    Nothing where none did."""
    changes = {kind: after[kind] - before[kind] for kind in after}
    told = sorted((kind for kind in changes if abs(changes[kind]) >= least), key=lambda kind: -abs(changes[kind]))
    return ", ".join(f"{kind} {changes[kind] / 1024:+.1f}" for kind in told) + (" MiB" if told else "")
