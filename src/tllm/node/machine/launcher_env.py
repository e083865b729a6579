"""Who this process is when a launcher, torchrun or Slurm, has started one for each rank. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tllm.core.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")
NOT_KEPT = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Launched:
    """One process of `world_size`. `local_size` of them are on this machine, None if the launcher does not say.

    `host` is the machine of rank 0, as rank 0 is told it. `run` is alike in all of them, and in most other starts
    another; it can be part of a file's name. `cores` are the processors that the launcher gave to this process, None
    if it does not say. `labels` are what the launcher calls the whole.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int | None
    host: str
    run: str
    launcher: Literal["torchrun", "slurm"] = "torchrun"
    cores: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> str:
        """The name of this process's node."""
        return self.node_of(self.rank)

    def node_of(self, rank: int) -> str:
        """The name of a launched process's node: by its rank, which torchrun's keep, or by its task's number."""
        return f"{'task' if self.launcher == 'slurm' else 'rank'}-{rank}"

    @property
    def is_elastic(self) -> bool:
        """Whether the launcher lets processes live on without one that ended; torchrun does on other machines only."""
        return self.launcher == "slurm"

    @property
    def is_one_machine(self) -> bool:
        return self.host in LOOPBACK_NAMES if self.local_size is None else self.local_size == self.world_size


def launched(environment: Mapping[str, str]) -> Launched | None:
    """Read the variables of torchrun, or of a step that srun started; None for a process that is alone.

    ConfigError for variables that are given by halves, or contradict each other.
    """
    found = _torchrun(environment) or _slurm(environment)
    if found is None or found.world_size == 1:
        return None
    if found.rank >= found.world_size or found.local_rank >= (found.local_size or found.world_size):
        raise ConfigError(
            f"this is rank {found.rank} of {found.world_size}, and on its machine {found.local_rank} of "
            f"{found.local_size or found.world_size}: the launcher's variables contradict each other",
            "let torchrun or srun set them, or unset them to start without a launcher",
        )
    return found


def _torchrun(environment: Mapping[str, str]) -> Launched | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in TORCHRUN if not environment.get(name)]
    if missing:
        given = [name for name in TORCHRUN if name not in missing]
        raise ConfigError(
            f"{' and '.join(given)} are set, and {' and '.join(missing)} not: is there a launcher or not?",
            "let torchrun set them all, or unset them to start without a launcher",
        )
    # Not how often it was started: a process that torchrun starts again finds those that have gone on.
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return Launched(
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", "0"),
        local_size=_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None,
        host=environment["MASTER_ADDR"],
        run=_run(environment, *names),
    )


def check_slurm(environment: Mapping[str, str]) -> None:
    """ConfigError unless srun has started this process."""
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return
    job = environment.get("SLURM_JOB_ID")
    raise ConfigError(
        f"job {job} of Slurm has started this process, and no srun in it" if job else "this is no job of Slurm",
        "write srun before tllm, in a script for sbatch or in salloc",
    )


def _slurm(environment: Mapping[str, str]) -> Launched | None:
    # A batch script has the variables of its allocation too, and is one process: only srun makes a step.
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise ConfigError(
            f"this is a heterogeneous job, {environment['SLURM_HET_SIZE']} jobs in one, each with tasks of its own",
            "ask for all machines in one job: sbatch without --hetjob and without a colon between options",
        )
    if "SLURM_NTASKS" not in environment and "SLURM_STEP_NUM_TASKS" not in environment:
        raise ConfigError("SLURM_PROCID is set, and SLURM_NTASKS not", "start with srun --ntasks N")
    size = _number(environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS")
    is_one_machine = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
    here = size if is_one_machine else _tasks_here(environment)
    job = environment.get("SLURM_JOB_ID", "")
    return Launched(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=size,
        local_rank=_number(environment, "SLURM_LOCALID", "0"),
        local_size=here,
        host=environment.get("MASTER_ADDR") or environment.get("SLURMD_NODENAME", ""),
        run=_run(environment, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        launcher="slurm",
        cores=_cores_of_task(environment, here),
        labels={"engine": "slurm", "job": job},
    )


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """How many tasks of the step are on this machine, by Slurm's list: "2(x3),1" is 2 on three machines, then 1."""
    found = [TASKS_PER_NODE.fullmatch(part) for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")]
    counts = [int(one[1]) for one in found if one is not None for _ in range(int(one[2] or 1))]
    place = _number(environment, "SLURM_NODEID", "0")
    return counts[place] if place < len(counts) and all(found) else None


def _cores_of_task(environment: Mapping[str, str], here: int | None) -> int | None:
    """Processors of one task: as asked for, else its part of what the job has on this machine."""
    if "SLURM_CPUS_PER_TASK" in environment:
        return _number(environment, "SLURM_CPUS_PER_TASK")
    if here is None or "SLURM_CPUS_ON_NODE" not in environment:
        return None
    return max(1, _number(environment, "SLURM_CPUS_ON_NODE") // max(1, here))


def _number(environment: Mapping[str, str], name: str, otherwise: str = "") -> int:
    text = environment.get(name, otherwise)
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a whole number", "let the launcher set it, or unset it")
    return int(text)


def _run(environment: Mapping[str, str], *names: str) -> str:
    return NOT_KEPT.sub("-", "-".join(filter(None, map(environment.get, names))))
