"""The folder of a run: the job as it was resolved, and each time that it was started, with the plan and the commit."""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import tllm
from tllm.core.disk import whole_file
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.checkpoint.save_folders import look
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob, write_job

JOB, STARTS = "job.toml", "starts.jsonl"
COMMIT = re.compile(r"[0-9a-f]{40,64}")


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run. `step` is how many steps were done before it, `time` in UTC, as ISO 8601 writes it."""

    time: str
    step: int
    plan: str
    world_size: int
    commit: str | None
    version: str = tllm.__version__


def start_now(step: int, plan: Plan) -> RunStart:
    """A start at this moment."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return RunStart(time=now, step=step, plan=str(plan), world_size=plan.world_size, commit=commit_here())


def write_start(folder: Path, resolved: ResolvedJob, start: RunStart) -> None:
    """Put the job into the run's folder, in the place of an earlier one, and add the start."""
    with _written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / JOB) as file:
            file.write(write_job(resolved).encode())
    add_start(folder, start)


def add_start(folder: Path, start: RunStart) -> None:
    """Add a start of the job that the folder has."""
    with _written(folder), (folder / STARTS).open("ab") as file:
        file.write(msgspec.json.encode(start) + b"\n")


def check_goes_on(job: Job) -> None:
    """ConfigError where the run's folder has saves of an adapter, and the job trains the model or an adapter of another
    rank; or the other way round. Before machines are waited for, which would find it when they read a save."""
    folder = Path(job.output_dir)
    if not (folder / JOB).is_file() or not any(save.finished for save in look(folder)):
        return
    began = tomllib.loads((folder / JOB).read_text()).get("lora", {}).get("r")
    now = None if job.lora is None else job.lora.r
    if began != now:
        raise ConfigError(
            f"the run in {folder} trains {_learned(began)}, and this job {_learned(now)}",
            "give another output_dir: a run goes on with what it began with",
        )


def _learned(rank: int | None) -> str:
    return "the whole model" if rank is None else f"an adapter of rank {rank}"


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}", "give another output_dir") from error


def commit_here() -> str | None:
    """The commit that this code was checked out from; None for an installed package."""
    source = Path(tllm.__file__).resolve().parents[1]
    # A package that is installed may lie inside somebody's own repository, whose commit would say nothing.
    return commit_of(source.parent) if source.name == "src" else None


def commit_of(root: Path) -> str | None:
    """The commit of a repository's work tree, read from its files; None if there is none."""
    git = root / ".git"
    if git.is_file():  # a work tree beside its repository
        git = root / git.read_text().removeprefix("gitdir:").strip()
    shared = _text(git / "commondir")
    places = [git, git / shared] if shared else [git]
    head = _text(git / "HEAD")
    name = head.removeprefix("ref:").strip()
    found = [head, *(_text(place / name) for place in places), *(_packed(place, name) for place in places)]
    return next((commit for commit in found if COMMIT.fullmatch(commit)), None)


def _packed(place: Path, name: str) -> str:
    lines = (line.split(" ", 1) for line in _text(place / "packed-refs").splitlines())
    return next((line[0] for line in lines if line[1:] == [name]), "")


def _text(path: Path) -> str:
    return path.read_text().strip() if os.access(path, os.R_OK) and path.is_file() else ""
