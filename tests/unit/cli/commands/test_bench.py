"""`tllm bench` before anything is measured, and its tables."""

from __future__ import annotations

import argparse

import pytest

from tllm.cli.arguments.parser import Parser
from tllm.cli.commands import bench
from tllm.cli.main import main
from tllm.core.errors import ConfigError
from tllm.recipes.bench import echo
from tllm.recipes.bench.collectives import CollectiveTimes, Figures
from tllm.recipes.bench.links import LinkBench, LinkTimes, between_machines
from tllm.recipes.bench.processes import Seat


def parse(*words: str) -> argparse.Namespace:
    parser = Parser("tllm bench", "")
    bench.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["links", "--ways", "gloop"], "'gloop'"),
        (["links", "--ways", "gloo", "--connect", "127.0.0.1:9"], "'gloo'"),
        (["collectives", "--kinds", "all_reduced"], "'all_reduced'"),
        (["collectives", "--ranks", "1"], "one rank alone"),
        (["collectives", "--listen", "127.0.0.1:9"], "on one machine"),
        (["links", "--connect", "127.0.0.1:9"], "no token"),
        (["links", "--connect", "127.0.0.1:9", "--listen", "127.0.0.1:9"], "not allowed with"),
        (["links", "--seconds", "nan"], "not a number above 0"),
        (["all"], "all"),
    ],
)
def test_faults_show_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TLLM_JOIN_TOKEN", raising=False)
    assert main(["bench", *words]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_what_is_asked() -> None:
    args = parse("links", "--sizes", "64,8K,1MB", "--turns", "2", "--seconds", "0.5", "--ways", "gloo,Ray")
    assert bench._settings(args) == LinkBench(("gloo", "Ray"), (64, 8192, 10**6), 2, 0.5)
    assert bench._settings(parse("collectives", "--tuned", "--kinds", "reduce")).kinds == ("reduce",)


def test_nothing_crosses_a_network_in_clear_unless_it_is_trusted() -> None:
    assert between_machines(trusted=False) == ("tllm TLS", "tllm gRPC")
    assert {"gloo", "tllm plain", "gRPC"} <= set(between_machines(trusted=True))


def test_rates_are_those_of_nccl_tests() -> None:
    one = Figures("all_reduce", "gloo", 3000, 0.5, 1.0, 9, None, 4100.0)
    times = CollectiveTimes(4, [one])
    assert times.algorithm_rate(one) == 3000
    assert times.bus_rate(one) == 2 * 3 / 4 * 3000
    titles, row = bench.collective_rows(times)
    assert dict(zip(titles, row, strict=True)) == {
        "kind": "all_reduce",
        "size": "2.9 KiB",
        "way": "gloo",
        "p10 us": "500000",
        "p50 us": "1000000",
        "alg MB/s": "0.0",
        "bus MB/s": "0.0",
        "payload B": "",
        "wire B": "4100",
    }


def test_links_have_a_row_a_size() -> None:
    times = LinkTimes({"gloo": {64: 1e-4, 1 << 20: 0.5}}, {"gloo": {64: 3, 1 << 20: 3}}, ["Ray"], 1)
    assert bench.link_rows(times) == [
        ["size", "gloo us", "gloo MB/s"],
        ["64 B", "100", "0.6"],
        ["1.0 MiB", "500000", "2.1"],
    ]
    assert bench._as_text("links", times).endswith("not installed: Ray")


def test_other_libraries_are_told_an_ipv6_address_as_they_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(echo, "interface_of", lambda host: "eth0")
    monkeypatch.setattr(echo.dist, "init_process_group", lambda backend, **how: told.append(how["init_method"]))
    echo.open_gloo(Seat(0, ("fe80::1", "fe80::2"), (7000, 7010), b"", b"", b""))
    assert told == [f"tcp://[fe80::1]:{7000 + echo.GLOO}"]
