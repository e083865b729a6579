"""The folders of saves: `step-N` is complete, `step-N.tmp` is being written, `step-N.gone` is being removed. No torch.

Every file is on its disk before any rank writes `checkpoint.json`, and that is before any folder is renamed: so if one
node has a save's `checkpoint.json`, the save is whole on all nodes, and those that were stopped before can be finished.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tllm.core.errors import WeightsError
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.manifest import NAME, decode
from tllm.weights.manifest import Manifest, hashes_of

STEP = re.compile(r"step-(\d+)(\.tmp|\.gone)?")


class FoundSave(msgspec.Struct, frozen=True):
    """One folder of a save on one node: the files it has, and what its list asks for if it has a true one."""

    step: int
    finished: bool
    digest: str
    needs: dict[str, int]
    files: dict[str, int]


FOUND_SAVES = msgspec.msgpack.Decoder(list[FoundSave])


class Chosen(msgspec.Struct, frozen=True):
    """A save that is whole over all nodes together, and a rank that has the list of it."""

    step: int
    digest: str
    owner: int
    finished_by_owner: bool


def folder_of(root: Path, step: int) -> Path:
    """Where a complete save lies."""
    return root / f"step-{step}"


def unfinished(root: Path, step: int) -> Path:
    """Where a save is written."""
    return root / f"step-{step}.tmp"


def gone(root: Path, step: int) -> Path:
    """Where a save is put before it is removed, as removing takes many steps."""
    return root / f"step-{step}.gone"


def look(root: Path) -> list[FoundSave]:
    """Every save in a run's folder, complete or not, those being removed left out."""
    found = []
    for path in sorted(root.iterdir()):
        match = STEP.fullmatch(path.name)
        if match and match[2] != ".gone" and path.is_dir():
            digest, needs = list_of(path / NAME)
            files = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
            found.append(FoundSave(int(match[1]), match[2] is None, digest, needs, files))
    return found


def choose(listings: Sequence[Sequence[FoundSave]]) -> list[Chosen]:
    """The saves that are whole, oldest first. `listings` is what each rank found."""
    chosen = []
    for step in sorted({found.step for listing in listings for found in listing}):
        here = [[found for found in listing if found.step == step] for listing in listings]
        lists = [(found.finished, rank, found) for rank, some in enumerate(here) for found in some if found.digest]
        # An unfinished one with a list was about to take the place of the finished one.
        for finished, rank, found in sorted(lists, key=lambda one: one[:2]):
            files = [_of_save(some, found.digest) for some in here]
            if all(any(one.get(name) == size for one in files) for name, size in found.needs.items()):
                chosen.append(Chosen(step, found.digest, rank, finished))
                break
    return chosen


def check_found(listings: Sequence[Sequence[FoundSave]]) -> None:
    """Refuse to begin anew, which `choose` finding nothing would mean, where there was a save that is whole no more."""
    ended = [found for listing in listings for found in listing if found.finished]
    if not ended:
        return
    newest = max(ended, key=lambda found: (found.step, found.digest))
    here = {(found.step, *file) for listing in listings for found in listing for file in found.files.items()}
    lost = [name for name, size in sorted(newest.needs.items()) if (newest.step, name, size) not in here]
    raise WeightsError(
        f"the save of step {newest.step} is not whole on these nodes: they lack {', '.join(lost) or NAME}",
        "bring back the node that wrote it, or its output_dir; to begin anew, give another output_dir",
    )


def list_text(root: Path, chosen: Chosen) -> bytes:
    """The bytes of a save's list, by the rank that has it."""
    place = folder_of if chosen.finished_by_owner else unfinished
    return (place(root, chosen.step) / NAME).read_bytes()


def keep_complete(disk: DurableDisk, root: Path, lists: dict[int, bytes]) -> None:
    """Leave only complete saves here: finish those of `lists`, by step, and remove every other that was begun.

    So is one of the same step with another list, or a torn one: of a node that was away while its step was taken again,
    or that died while it was brought the list. All that the save is made of is whole elsewhere, and is brought again.
    A node that died while it wrote has files of that attempt alone, which may be as long: those go, by their hashes.
    """
    for step, text in lists.items():
        digest, _ = list_of(folder_of(root, step) / NAME)
        if digest == hashlib.sha256(text).hexdigest():
            continue
        if unfinished(root, step).is_dir():
            _remove_others(disk, unfinished(root, step), decode(text).hashes)
            finish(disk, root, step, text)
        else:
            discard(disk, root, step)
    for path in sorted(root.iterdir()):
        match = STEP.fullmatch(path.name)
        if match and match[2]:
            disk.remove(path)


def finish(disk: DurableDisk, root: Path, step: int, text: bytes) -> None:
    """Write the list into a save whose files are all there, and give it its name."""
    begun, final, old = unfinished(root, step), folder_of(root, step), gone(root, step)
    disk.write(begun / NAME, [text])
    disk.sync_folder(begun)
    if final.exists():
        disk.remove(old)
        disk.rename(final, old)
    disk.rename(begun, final)
    disk.remove(old)


def _remove_others(disk: DurableDisk, folder: Path, hashes: Manifest) -> None:
    """Remove every file of a folder, a list aside, that is none of those which have these hashes."""
    for path in sorted(folder.iterdir()):
        if path.name != NAME and hashes.files.get(path.name) != hashes_of(path, hashes.chunk_bytes):
            disk.remove(path)


def discard(disk: DurableDisk, root: Path, step: int) -> None:
    """Remove a complete save."""
    disk.remove(gone(root, step))
    if folder_of(root, step).is_dir():
        disk.rename(folder_of(root, step), gone(root, step))
        disk.remove(gone(root, step))


def steps_here(root: Path) -> list[int]:
    """The steps of the folders that carry a complete save's name."""
    return sorted(found.step for found in look(root) if found.finished)


def _of_save(some: Sequence[FoundSave], digest: str) -> dict[str, int]:
    """The files that a node has of the save with this list: in the folder that has it, else in the one not finished."""
    for found in some:
        if found.digest == digest:
            return found.files
    return next((found.files for found in some if not found.finished and not found.digest), {})


def list_of(path: Path) -> tuple[str, dict[str, int]]:
    """The hash of a save's list and the files it needs; nothing of one that is not there or not true."""
    try:
        text = path.read_bytes()
        saved = decode(text)
    except (OSError, WeightsError):
        return "", {}
    return hashlib.sha256(text).hexdigest(), {name: file.size for name, file in saved.hashes.files.items()}
