"""`EqualHosts`: five hosts that all serve HTTP and all know the coordinator's state, so that any two may fail.

Each host has a disk of its own, which can be filled, and a clock of its own, which can be moved.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.cluster.faulty_cluster import KEY, PORT
from tests.support.cluster.hosts import Hosts
from tests.support.cluster.processes import descendants
from tests.support.comm.namespaces import inside

COUNT = 5
DISK_BYTES = 8 * 1024 * 1024
START_SECONDS = 300.0
CLOCK = Path(__file__).with_name("moved_clock.c")


class EqualHosts:
    """The cluster. Used in a `with`, which ends every process and every disk."""

    def __init__(self, hosts: Hosts, model: Path, folder: Path) -> None:
        self.hosts, self.model, self.folder = hosts, model, folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.is_forming = True
        self._clock = folder / "moved_clock.so"

    def __enter__(self) -> EqualHosts:
        with ExitStack() as undone:
            undone.push(self.__exit__)
            self._form()
            undone.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            for pid in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for host in range(COUNT):
            subprocess.run(["umount", str(self.disk(host))], capture_output=True, check=False)

    def disk(self, host: int) -> Path:
        """Where a host's processes keep what they keep."""
        return self.folder / f"disk-{host}"

    def log(self, host: int) -> str:
        return (self.folder / f"host-{host}.log").read_text(errors="replace")

    def post(self, host: int, path: str, body: Any, seconds: float) -> http.client.HTTPResponse:
        """The beginning of a host's answer; whoever asks is on the host."""
        with inside(self.hosts.names[host]):
            connection = http.client.HTTPConnection(self.hosts.addresses[host], PORT, timeout=seconds)
            connection.request("POST" if body is not None else "GET", path, body and json.dumps(body), HEADERS)
            return connection.getresponse()

    def signal(self, host: int, number: int) -> None:
        """A signal to every process of a host."""
        process = self.processes[host]
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def fill_disk(self, host: int) -> None:
        """Not a byte is left for the host's processes."""
        with (self.disk(host) / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(65536))

    def free_disk(self, host: int) -> None:
        (self.disk(host) / "filler").unlink()

    def move_clock(self, host: int, seconds: int) -> None:
        """Set the time of day of a host's processes so much forward, or back."""
        with self._moved(host).open("r+b", buffering=0) as file:
            file.write(struct.pack("q", seconds))

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:g} s for {what}; the first host's log:\n{self.log(0)[-1500:]}")
            assert self.processes[0].poll() is None or not self.is_forming, self.log(0)[-1500:]
            time.sleep(0.1)

    def _form(self) -> None:
        compiled = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._clock), str(CLOCK), "-ldl"]
        subprocess.run(compiled, check=True)
        words = ["serve", str(self.model), "--nodes", str(COUNT), "--plan", f"pp={COUNT}"]
        words += ["--replicas-of-coordinator", str(COUNT), "--cluster-host", self.hosts.addresses[0]]
        self._start(0, *words)
        line = self._said(0, r"tllm join (\S+) --token (\S+)")
        for host in range(1, COUNT):
            self._start(host, "join", line[1], "--token", line[2], "--name", f"host-{host}", "--serve")
        for host in range(COUNT):
            self.until(partial(self._is_whole, host), START_SECONDS, f"host {host} to be whole")
        self.is_forming = False

    def _is_whole(self, host: int) -> bool:
        try:
            reply = self.post(host, "/v1/cluster", None, 5)
            status = json.loads(reply.read())
        except (OSError, http.client.HTTPException):
            return False
        replicas = (status.get("replicas") or {}).get("nodes", ())
        return bool(status.get("ready")) and len(replicas) == COUNT

    def _moved(self, host: int) -> Path:
        return self.folder / f"clock-{host}"

    def _start(self, host: int, *words: str) -> None:
        disk = self.disk(host)
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
        self._moved(host).write_bytes(bytes(8))
        env = {
            "LD_PRELOAD": str(self._clock),
            "TLLM_MOVED_CLOCK": str(self._moved(host)),
            "TLLM_API_KEY": KEY,
            "TMPDIR": str(disk),
            "XDG_CACHE_HOME": str(disk),
        }
        words = (*words, "--threads", "1", "--host", self.hosts.addresses[host], "--port", str(PORT))
        words = (*words, "--cache-dir", str(disk / "pages"))
        log = self.folder / f"host-{host}.log"
        self.processes.append(self.hosts.start(host, sys.executable, "-m", "tllm.cli", *words, env=env, log=log))

    def _said(self, host: int, pattern: str) -> re.Match[str]:
        self.until(lambda: re.search(pattern, self.log(host)) is not None, START_SECONDS, pattern)
        found = re.search(pattern, self.log(host))
        assert found is not None
        return found


HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
