"""A whole Slurm on this machine: munge, a controller and several slurmd, each of which is a machine with a name.

Jobs of the partition `urgent` preempt those of `all`, the default, which are requeued and have a minute to save.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tllm.recipes.bench.processes import free_row

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")

CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=10
InactiveLimit=0
MinJobAge=300
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str:
    """Why no Slurm can run here; "" if one can."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=search_path(os.environ["PATH"])) is None]:
        return f"Slurm is not installed here ({', '.join(missing)})"
    return "" if os.geteuid() == 0 else "slurmd and munged are started as root"


def search_path(before: str) -> str:
    return os.pathsep.join((before, "/usr/sbin", "/usr/local/sbin"))


class Slurm:
    """Its commands; jobs get `environment` beside what Slurm gives them."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = search_path(self.environment["PATH"])

    def __call__(self, *words: str) -> str:
        """What a command of Slurm prints; AssertionError where it fails."""
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=self.environment)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, *words: str) -> int:
        """The number of the job."""
        return int(self("sbatch", "--parsable", *words, str(script)))

    def state(self, job: int) -> dict[str, str]:
        """What the controller says of a job: JobState, Restarts, ExitCode and so on."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", str(job))))

    def until(self, job: int, *states: str, seconds: float) -> dict[str, str]:
        """Wait until the job is in one of these states."""
        end = time.monotonic() + seconds
        while (found := self.state(job))["JobState"] not in states:
            assert time.monotonic() < end, f"job {job} is {found['JobState']} after {seconds:g} s\n{self.told()}"
            time.sleep(0.2)
        return found

    def start_now(self, job: int, seconds: float = 120.0) -> None:
        """Start a job that was requeued, for which Slurm would wait two minutes.

        Not at once: a machine refuses what was begun in the second in which it ended the job before.
        """
        end = time.monotonic() + seconds
        while (found := self.state(job))["Reason"] != "BeginTime":
            assert time.monotonic() < end, f"job {job} waits for {found['Reason']}\n{self.told()}"
            time.sleep(0.2)
        self("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")
        self.until(job, "RUNNING", seconds=seconds)

    def told(self) -> str:
        """What jobs have printed, and the last words of the daemons."""
        files = [*sorted(self.folder.glob("*.out")), *sorted(self.folder.glob("*.log"))]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


@contextlib.contextmanager
def slurm(folder: Path, nodes: int, environment: Mapping[str, str]) -> Iterator[Slurm]:
    """Start all of it in a folder, with machines n1, n2 and so on; ended, with all that runs on it, with the block."""
    host, first = socket.gethostname(), free_row(nodes + 1)
    lines = [
        f"NodeName=n{i + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={first + 1 + i} CPUs=1 State=UNKNOWN"
        for i in range(nodes)
    ]
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONF.format(host=host, port=first, folder=folder, nodes="\n".join(lines)))
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    one = Slurm(folder, environment)
    files = [f"--{kind}={folder}/munge.{end}" for kind, end in dict(socket="sock", log="log").items()]
    files += [f"--key-file={key}", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed"]
    with contextlib.ExitStack() as stack:

        def daemon(name: str, *words: str) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(words, stdout=log, stderr=log, env=one.environment)
            stack.callback(_end, process)

        daemon("munged", "munged", "--foreground", "--force", *files)
        _wait(lambda: (folder / "munge.sock").exists(), one)
        daemon("slurmctld", "slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf"))
        for i in range(nodes):
            daemon(f"slurmd-n{i + 1}", "slurmd", "-D", "-N", f"n{i + 1}", "-f", str(folder / "slurm.conf"))
        _wait(lambda: _idle(one) == nodes, one)
        stack.callback(_end_jobs, one)
        yield one


def _idle(one: Slurm) -> int:
    """How many machines are idle; each has a line for each of its partitions."""
    words = ("sinfo", "--noheader", "--Node", "--format=%N %T")
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=one.environment)
    return len({line for line in done.stdout.splitlines() if line.split()[1:] == ["idle"]})


def _wait(holds: object, one: Slurm, seconds: float = 120.0) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"Slurm did not start\n{one.told()}"
        time.sleep(0.1)


def _end_jobs(one: Slurm) -> None:
    """Kill what still runs, so that no task outlives its slurmd."""
    one("scancel", "--signal=KILL", "--full", "--user=root")
    one("scancel", "--user=root")
    end = time.monotonic() + 60
    while one("squeue", "--noheader") and time.monotonic() < end:
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
