"""What the variables of torchrun and Slurm say, and what is refused."""

from __future__ import annotations

import pytest

from tllm.core.errors import ConfigError
from tllm.node.machine.launcher_env import Launched, check_slurm, launched

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head.lab",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a/b",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURMD_NODENAME": "rack1-07",
}


def test_torchrun() -> None:
    found = launched(TORCHRUN)
    assert found == Launched(3, 4, 1, 2, "head.lab", "head.lab-29500-a-b")
    assert not found.is_one_machine
    assert launched({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).is_one_machine  # type: ignore[union-attr]


def test_only_what_must_be_given_is_needed() -> None:
    few = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    found = launched(few)
    assert found == Launched(0, 2, 0, None, "localhost", "localhost")
    assert found.is_one_machine
    assert not launched({**few, "MASTER_ADDR": "head.lab"}).is_one_machine  # type: ignore[union-attr]


def test_slurm() -> None:
    found = launched(SLURM)
    labels = {"engine": "slurm", "job": "77"}
    assert found == Launched(2, 3, 0, None, "rack1-07", "77-1", "slurm", None, labels)
    assert not found.is_one_machine
    assert (found.node, found.is_elastic) == ("task-2", True)
    here = launched({**SLURM, "SLURM_NNODES": "1", "SLURM_LOCALID": "2"})
    assert here is not None and here.local_size == 3 and here.is_one_machine


@pytest.mark.parametrize(
    ("more", "here", "cores"),
    [
        ({}, 2, None),
        ({"SLURM_CPUS_ON_NODE": "8"}, 2, 4),
        ({"SLURM_CPUS_ON_NODE": "1"}, 2, 1),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "3"}, 2, 3),
        ({"SLURM_NODEID": "2"}, 1, None),
        ({"SLURM_NODEID": "3"}, None, None),  # more machines than the list has
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, None, None),
    ],
)
def test_processors_are_shared_by_the_tasks_of_a_machine(more: dict[str, str], here: int, cores: int) -> None:
    found = launched({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", **more})
    assert found is not None
    assert (found.local_size, found.cores) == (here, cores)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "this is no job of Slurm"),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, "job 77 of Slurm has started this process, and no srun"),
    ],
)
def test_who_asks_for_slurm_must_be_a_task_of_srun(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_slurm(environment)
    check_slurm(SLURM)


def test_torchrun_inside_a_slurm_step_counts() -> None:
    assert launched({**SLURM, **TORCHRUN}) == launched(TORCHRUN)


@pytest.mark.parametrize(
    "alone",
    [
        {},
        {"MASTER_ADDR": "head.lab"},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # a batch script
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a shell that srun gave
    ],
)
def test_a_process_that_is_alone_was_not_launched(alone: dict[str, str]) -> None:
    assert launched(alone) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "RANK are set, and WORLD_SIZE and MASTER_ADDR not"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "head.lab"}, "WORLD_SIZE and MASTER_ADDR are set, and RANK not"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR not"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "on its machine 2 of 2"),
        ({**SLURM, "SLURM_PROCID": "3"}, "rank 3 of 3"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS not"),
        ({**SLURM, "SLURM_HET_SIZE": "2"}, "heterogeneous job, 2 jobs in one"),
        ({**SLURM, "SLURM_CPUS_PER_TASK": "two"}, "SLURM_CPUS_PER_TASK='two' is not a whole number"),
    ],
)
def test_what_is_given_by_halves_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launched(environment)
