"""Several hosts on this machine: network namespaces joined by a switch of their own, with a rate, a delay and losses.

`Hosts(3)` joins them by veth pairs and a bridge: cables can be pulled, frames lost, rates changed. `Hosts(3,
delay_ms=5, loss=0.01)` joins them by TUN devices and a relay in user space instead, since this kernel cannot delay
packets itself. tc's token bucket keeps to a rate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.support.commands.forked_command import ForkedCommand

NOBODY = "02:00:00:00:00:fe"
BURST = "32kb"
"""What a link that has rested takes at once: little beside a message, or it would be faster than its rate."""

RELAY = Path(__file__).with_name("packet_switch.py")


def why_not() -> str:
    """Why namespaces cannot be made here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need Debian's iproute2"
    probe = subprocess.run(["ip", "netns", "add", f"tllm-probe-{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"this machine makes no network namespaces: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"tllm-probe-{os.getpid()}"], check=True)
    return ""


class Hosts:
    """`count` hosts with addresses 10.77.0.1 and up. Used in a `with`, which takes everything down again."""

    def __init__(self, count: int, rate: str = "", delay_ms: float = 0, loss: float = 0) -> None:
        self.names = [f"tllm-{os.getpid()}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.switch = f"tllm-{os.getpid()}-switch"
        self.rate, self.delay_ms, self.loss = rate, delay_ms, loss
        self.processes: list[subprocess.Popen[bytes]] = []
        self.relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        if self.delay_ms or self.loss:
            self._join_by_relay()
        else:
            self._join_by_bridge()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def command(self, host: int, *words: str) -> list[str]:
        """The command line that runs `words` on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def start(self, host: int, *words: str, env: dict[str, str] | None = None, log: Path) -> subprocess.Popen[bytes]:
        """Start a process on a host, its output in `log`; it is killed when the hosts go."""
        with log.open("wb") as out:
            process = ForkedCommand(
                self.command(host, *words), stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
            )
        self.processes.append(process)
        return process

    def link(self, host: int, up: bool) -> None:
        """Plug a host's cable in or out (bridge only)."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "up" if up else "down")

    def lose(self, host: int, sent: bool, received: bool) -> None:
        """From now on all that a host sends, or that is sent to it, is lost without a sign (bridge only)."""
        for other in range(len(self.names)):
            if other != host and sent:
                self._mislead(host, other)
            if other != host and received:
                self._mislead(other, host)

    def find(self) -> None:
        """No more is lost."""
        for name in self.names:
            _ip("-n", name, "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def narrow(self, host: int, rate: str) -> None:
        """What a host sends and what is sent to it goes at this rate, "" for no limit (bridge only)."""
        for name, device in ((self.names[host], "eth0"), (self.switch, f"port{host}")):
            what = ["replace", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", "400ms"]
            subprocess.run(["tc", "-n", name, "qdisc", *(what if rate else ["del", "dev", device, "root"])], check=True)

    def delay(self, milliseconds: float) -> None:
        """Every packet is so long under way from now on (relay only: of hosts that began with a delay)."""
        assert self.relay is not None and self.relay.stdin is not None, "only a relay can delay"
        self.relay.stdin.write(f"{milliseconds}\n".encode())
        self.relay.stdin.flush()

    def put_relay_first(self) -> None:
        """A real link does not wait for a processor: let the relay, if there is one, come before all other work."""
        if self.relay is not None:
            os.sched_setscheduler(self.relay.pid, os.SCHED_FIFO, os.sched_param(2))

    def _mislead(self, host: int, other: int) -> None:
        """A host's frames to another go to an address that nobody has."""
        words = ["neigh", "replace", self.addresses[other], "lladdr", NOBODY, "dev", "eth0", "nud", "permanent"]
        _ip("-n", self.names[host], *words)

    def _join_by_bridge(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            _ip("-n", self.switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self.switch, "link", "set", f"port{i}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            self._limit(name)

    def _limit(self, name: str) -> None:
        """What leaves a host leaves at the rate, if there is one."""
        if self.rate:
            shape = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", self.rate, "burst", BURST]
            subprocess.run(["tc", "-n", name, *shape, "latency", "50ms"], check=True)

    def _join_by_relay(self) -> None:
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "tuntap", "add", "dev", "eth0", "mode", "tun")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "mtu", "9000", "up")
            self._limit(name)
        pairs = [f"{name}={address}" for name, address in zip(self.names, self.addresses, strict=True)]
        relay = [sys.executable, str(RELAY), str(self.delay_ms), str(self.loss), *pairs]
        process = self.relay = subprocess.Popen(relay, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n", "the relay did not start"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
