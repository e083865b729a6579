"""`DurableDisk`: the durable steps of which a save is made. Tests can stop before and after each of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Of each mount a line: its device's number in the third place, type and source behind a hyphen (proc(5))."""


class DurableDisk:
    """Files that are wholly there, or not, whatever moment the machine stops at. Raises OSError as the system does."""

    def point(self, what: str) -> None:
        """Called before and after each step; does nothing."""

    def make_folder(self, folder: Path) -> None:
        """A folder that may be there already."""
        self.point(f"before make {folder.name}")
        folder.mkdir(parents=True, exist_ok=True)
        self.point(f"after make {folder.name}")

    def write(self, path: Path, content: Iterable[bytes | memoryview]) -> int:
        """A new file, on the disk when this returns; the bytes it has."""
        size = 0
        self.point(f"before write {path.name}")
        with path.open("wb", buffering=0) as file:
            for one in content:
                rest = memoryview(one)
                while rest:
                    written = file.write(rest)
                    rest, size = rest[written:], size + written
                self.point(f"inside write {path.name}")
            self.point(f"before sync {path.name}")
            self.sync(file.fileno(), path)
        self.point(f"after sync {path.name}")
        return size

    def sync_folder(self, folder: Path) -> None:
        """Names that were added to, or taken from, a folder are on the disk when this returns."""
        self.point(f"before sync {folder.name}")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            self.sync(descriptor, folder)
        finally:
            os.close(descriptor)
        self.point(f"after sync {folder.name}")

    def free(self, folder: Path) -> int | None:
        """Bytes that may still be written there; None where the system does not say."""
        usage = shutil.disk_usage(folder)
        return usage.free if usage.total else None

    def network_source(self, folder: Path) -> str:
        """What other machines call the disk too, as `nas:/data` or `//nas/data`, where it is one of the network; else
        "". Linux alone says so."""
        device = folder.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        lines = MOUNTS.read_text().splitlines() if MOUNTS.is_file() else []
        sources = (line.partition(" - ")[2].split()[1] for line in lines if line.split()[2] == number)
        return next((source for source in sources if ":/" in source or source.startswith("//")), "")

    def sync(self, descriptor: int, path: Path) -> None:
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """In one step, and on the disk when this returns."""
        self.point(f"before rename {old.name}")
        old.rename(new)
        self.point(f"after rename {old.name}")
        self.sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        """A file or a folder with all in it; nothing happens if it is not there."""
        self.point(f"before remove {path.name}")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        self.point(f"after remove {path.name}")
