"""`tllm doctor` over three hosts, one of which has a 100 Mbit/s port: it is named, and the others are not."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.cluster.commands import running
from tests.support.cluster.hosts import Hosts, why_not

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


def slow_port(hosts: Hosts, host: int) -> None:
    """What a host sends and what it is sent passes at 100 Mbit/s."""
    shape = ["root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"]
    for place, device in ((hosts.names[host], "eth0"), (hosts.switch, f"port{host}")):
        subprocess.run(["tc", "-n", place, "qdisc", "add", "dev", device, *shape], check=True)


@pytest.mark.slow
def test_a_slow_port_is_named() -> None:
    words = ["doctor", "--nodes", "3", "--seconds", "2", "--json", "--quiet", "--threads", "1"]
    with Hosts(3) as hosts:
        slow_port(hosts, 2)
        with running(*words, "--cluster-host", hosts.addresses[0], host=hosts.command(0)) as doctor:
            assert doctor.process.stderr is not None and doctor.process.stdout is not None
            line = next(one for one in doctor.process.stderr if "--token" in one).split()
            examined = ["doctor", *line[2:], "--threads", "1"]
            with running(*examined, host=hosts.command(1)) as b, running(*examined, host=hosts.command(2)) as c:
                said = json.loads(doctor.process.stdout.read())
                assert doctor.wait()[0] == 1
                assert b.wait()[0] == c.wait()[0] == 0
    slow = said["nodes"][2 if said["nodes"][2]["address"] == hosts.addresses[2] else 1]
    assert slow["address"] == hosts.addresses[2]
    rates = {(way["source"], way["target"]): way["measured"]["bandwidth"] * 8e-6 for way in said["ways"]}
    assert all((rate < 110) == (slow["node"] in pair) for pair, rate in rates.items()), rates
    assert {way["measured"]["mtu"] for way in said["ways"]} == {1500}
    (port,) = [one for one in said["findings"] if "Mbit/s to others" in one["what"]]
    assert port["about"] == slow["node"]
    assert "a 100 Mbit/s port or cable" in port["what"]
