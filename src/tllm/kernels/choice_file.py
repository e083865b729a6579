"""`ChoiceFile`: which ways to compute were the fastest on this machine, kept between starts. No torch.

One file for each machine and program, by a hash of its `MachineKey`. Any process of this user may write to it: a file
appears whole under its name (`os.replace`), with what others have added meanwhile. What it says decides only which of
several ways is taken, never what is computed: whoever reads it checks that the ways are those that there are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from tllm.core.disk import PART, whole_file
from tllm.core.errors import UNREADABLE
from tllm.kernels.fastest import Choice

log = logging.getLogger("tllm.kernels")

VERSION = 1
MOST_BYTES = 2 * 2**20
MOST_CHOICES = 2000
"""Of one machine, in all areas; those that were measured first are dropped first."""

MOST_FILES = 32
"""Of other machines that share this folder, and of programs that were here before; the oldest are deleted."""

LOCK = ".lock"
LOCK_TRIES, LOCK_SECONDS = 40, 0.005
"""Who does not get the lock in that time writes without it: at worst another process's choice is measured again."""

Text = Annotated[str, msgspec.Meta(max_length=300)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e6)]


class MachineKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be the same for a choice to hold. `settings` are variables that hide instructions from libraries;
    `instructions`, `kernels` and `program` are digests of all that the processor can do, and of files."""

    processor: Text
    instructions: Text
    kernels: Text
    torch: Text
    capability: Text
    settings: Annotated[dict[Text, Text], msgspec.Meta(max_length=16)]
    tllm: Text
    program: Text


class KeptChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way that is taken, and the best seconds of each, by their names."""

    winner: Text
    seconds: Annotated[dict[Text, Seconds], msgspec.Meta(min_length=1, max_length=16)]


class MachineChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. `choices` are by area ("product"), and by what is alike, in words."""

    version: int
    machine: MachineKey
    choices: dict[Text, dict[Text, KeptChoice]]


class FileFacts(NamedTuple):
    """By which a file that another process has replaced is known."""

    number: int
    size: int
    nanoseconds: int

    @classmethod
    def of(cls, facts: os.stat_result) -> FileFacts:
        return cls(facts.st_ino, facts.st_size, facts.st_mtime_ns)


class ChoiceFile:
    """The choices of one machine and program in `folder`. Any thread may call it.

    `ignores`: nothing that is there is believed, and what is measured takes its place. A file that is damaged, that
    belongs to others or that others may write to is warned of once, and not believed either.
    """

    def __init__(self, folder: Path, machine: MachineKey, ignores: bool = False) -> None:
        name = hashlib.sha256(msgspec.json.encode(machine, order="deterministic")).hexdigest()[:16]
        self.folder, self.path, self.machine, self.ignores = folder, folder / f"{name}.json", machine, ignores
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, KeptChoice]] = {}
        self._facts: FileFacts | None = None
        self._warned: set[str] = set()

    def get(self, area: str, kind: str, names: Collection[str]) -> Choice | None:
        """What is known of this kind, if it was chosen among just these names."""
        if self.ignores:
            return None
        with self._lock:
            self._read()
            kept = self._known.get(area, {}).get(kind)
        if kept is None or kept.seconds.keys() != set(names) or kept.winner not in kept.seconds:
            return None
        return Choice(kept.winner, dict(kept.seconds))

    def put(self, area: str, kind: str, choice: Choice) -> None:
        """Keep a choice. A folder that cannot be written to is told once."""
        kept = KeptChoice(choice.name, choice.seconds)
        try:
            with self._lock:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _locked(self.folder / LOCK):
                    self._read()
                    known = self._known.setdefault(area, {})
                    known.pop(kind, None)
                    known[kind] = kept
                    self._write()
        except OSError as error:
            self._say_once(logging.INFO, f"what was measured is not kept in {self.folder}: {error.strerror}")

    def count(self) -> int:
        """How many choices the file has."""
        with self._lock:
            self._read()
            return sum(map(len, self._known.values()))

    def _read(self) -> None:
        """Read the file anew if another process has written it."""
        try:
            with open(self.path, "rb", opener=_open_own) as file:
                facts = os.fstat(file.fileno())
                if FileFacts.of(facts) == self._facts:
                    return
                self._facts, self._known = FileFacts.of(facts), {}
                fault = _fault_of(facts)
                content = b"" if fault else file.read(MOST_BYTES)
        except FileNotFoundError:
            self._facts, self._known = None, {}
            others = len(self._files())
            log.debug("no choices are kept for this machine and program in %s (%d of others)", self.folder, others)
            return
        except OSError as error:
            self._say_once(logging.WARNING, f"{self.path} is not read, and its choices are measured anew: {error}")
            return
        if not fault:
            fault = self._take(content)
        if fault:
            self._say_once(logging.WARNING, f"{self.path} is not read, and its choices are measured anew: {fault}")

    def _take(self, content: bytes) -> str:
        """Take what a file says; why it says nothing, if it does not."""
        try:
            found = msgspec.json.decode(content, type=MachineChoices)
        except UNREADABLE as error:
            return str(error)
        if found.version != VERSION or found.machine != self.machine:
            log.debug("%s is of another machine or program, and is not used: %s", self.path, found.machine)
            return ""
        if sum(map(len, found.choices.values())) > MOST_CHOICES:
            return f"it has more than {MOST_CHOICES} choices"
        self._known = found.choices
        return ""

    def _write(self) -> None:
        """Write all that is known to a new file, and let it take the place of the old one."""
        while sum(map(len, self._known.values())) > MOST_CHOICES:
            longest = max(self._known.values(), key=len)
            del longest[next(iter(longest))]
        content = msgspec.json.encode(MachineChoices(VERSION, self.machine, self._known))
        with whole_file(self.path, 0o600) as file:
            file.write(msgspec.json.format(content, indent=1))
            file.flush()
            self._facts = FileFacts.of(os.fstat(file.fileno()))
        for path in self._files()[MOST_FILES:]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _files(self) -> list[Path]:
        """The files of all machines and programs, and what a process that was killed has left, newest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix in (".json", PART):
                    found.append((path.stat(follow_symlinks=False).st_mtime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]

    def _say_once(self, level: int, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.log(level, "%s", what)


def _fault_of(facts: os.stat_result) -> str:
    """Why a file is not to be believed, by who may write it and how long it is; "" for one that is."""
    if not stat.S_ISREG(facts.st_mode):
        return "it is no file"
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.geteuid() or mode & 0o022:
        return f"it has mode {mode:04o} and owner {facts.st_uid}, so that others may write it"
    return f"it has {facts.st_size} bytes, more than {MOST_BYTES}" if facts.st_size > MOST_BYTES else ""


def _open_own(path: str, flags: int) -> int:
    """Follow no link and wait for no pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes ask for too, if it can be had soon."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(LOCK_TRIES):
            with contextlib.suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOCK_SECONDS)
        yield
    finally:
        os.close(number)
