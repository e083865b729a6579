"""`tllm train` on one host and `tllm join` on two others that share no disk, over shaped and far links."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster.commands import Running, running
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.training.runs import records as told
from tests.support.training.runs import train
from tests.support.training.small_job import CONFIG, write_job
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.traffic import step_traffic
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.training.job.job_file import read_job
from tllm.training.report.metrics import StepRecord, read_records

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

HEADERS = 66
"""Bytes of each packet before its TCP payload: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12."""
SEGMENT = 1448
TLS = 1 + 22 / 16384
"""TLS 1.3 puts 5 bytes before a record of 16 KiB at most, and 1 and 16 after it. A frame's own 64 bytes are not seen
beside messages of a megabyte."""

FLOAT32_WEIGHTS = dict(
    hidden_size=128, intermediate_size=320, num_attention_heads=6, num_key_value_heads=3, head_dim=16
)


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The working directory of each host."""
    made = [tmp_path / f"host-{number}" for number in range(3)]
    for folder in made:
        folder.mkdir()
    return made


class Train:
    """One start of a run: the command on host 0, which has the job, and a `tllm join` on each of two others."""

    def __init__(self, hosts: Hosts, folders: Sequence[Path], others: Sequence[int], plan: str, *more: str) -> None:
        self._hosts, self._folders, self._stack = hosts, folders, ExitStack()
        where = ["--nodes", "3", "--plan", plan, "--cluster-host", hosts.addresses[0], "--on-loss", "end"]
        words = [*where, "--threads", "1", *more]
        self.command = self._start(0, folders[0], "train", "job.toml", *words)
        line = self.command.until(r"tllm join (\S+) --token (\S+)")
        self.joined = [
            self._start(host, folder, "join", line[1], "--token", line[2], "--name", f"host-{host}", "--threads", "1")
            for host, folder in zip(others, folders[1:], strict=True)
        ]

    def __enter__(self) -> Train:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, host: int, folder: Path, *words: str) -> Running:
        return self._stack.enter_context(running(*words, host=self._hosts.command(host, "env", "-C", str(folder))))


def records(folder: Path, run: str = "run") -> list[StepRecord]:
    return read_records(folder / run / "metrics.jsonl")


@pytest.mark.soak  # `test_faults` loses a node over hosts, `test_training_recovery` has one replaced
def test_a_run_over_far_hosts_goes_on_after_one_was_replaced(folders: list[Path]) -> None:
    """Another host gets the disk of the one that was lost. Nobody but the first has the data, or the finished model."""
    job = write_job(
        folders[0],
        dict(num_hidden_layers=3, initializer_range=0.02),  # as `train` begins a model
        output_dir="run",
        save_steps=10,
        max_steps=40,
    )
    with Hosts(4, delay_ms=5) as hosts:
        with Train(hosts, folders, [1, 2], "pp=3") as first:
            first.command.until(r"saved step 10:")
            first.joined[1].process.kill()
            code, said = first.command.wait()
            lost = r"error: node host-2 \(rank \d, layers .*\) went away"
            assert code == 4 and re.search(lost, said), said
        with Train(hosts, folders, [1, 3], "pp=3") as second:
            second.command.until(r"going on after step [123]0")
            code, said = second.command.wait()
            assert code == 0, said
            assert [joined.wait()[0] for joined in second.joined] == [0, 0]
    ours = replace(read_job(job).job, output_dir=str(folders[0] / "whole"))
    want = [record.loss for record in told(train(ours, "pp=1"))]
    assert [record.step for record in records(folders[0])] == list(range(1, 41))
    assert [record.loss for record in records(folders[0])] == pytest.approx(want, rel=1e-5)
    assert (folders[0] / "run" / "final" / "model.safetensors").is_file()
    for folder in folders[1:]:
        assert sorted(path.name for path in (folder / "run").iterdir()) == ["step-30", "step-40"]
        assert not (folder / "run" / "step-30" / "model-00000.safetensors").exists()


SOAK = [pytest.param(plan, marks=pytest.mark.soak) for plan in ("tp=3", "pp=3")]


@pytest.mark.parametrize("plan", ["dp=3,zero=2", *SOAK])
def test_the_wires_carry_what_the_formulas_say(plan: str, folders: list[Path]) -> None:
    """Bytes that leave all hosts in three steps: those of a run of five, without those of a run of two."""
    config = {**FLOAT32_WEIGHTS, "num_hidden_layers": 3}
    rows = [{"input_ids": [(7 * row + place) % 300 for place in range(128)]} for row in range(24)]
    (folders[0] / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_job(
        folders[0],
        config,
        output_dir="run",
        train_files=["rows.jsonl"],
        seq_len=128,
        global_batch_size=12,
        microbatch_size=2,
        packing=False,
    )
    sent, again = list[int](), 0
    with Hosts(3, rate="100mbit") as hosts:
        for steps in (2, 5):
            before = leaving(hosts)
            more = ("--set", f"max_steps={steps}", "--set", f"output_dir=run-{steps}")
            with Train(hosts, folders, [1, 2], plan, *more) as run:
                code, said = run.command.wait()
                assert code == 0, said
                assert [joined.wait()[0] for joined in run.joined] == [0, 0]
            sent.append(leaving(hosts) - before)
        again = resent(hosts)
    spec = spec_from_config({**CONFIG, **config})
    facts = TrainingFacts(seq_len=128, global_batch_size=12, microbatch_size=2, target_tokens=127)
    planned = sum(rank.total for rank in step_traffic(spec, Plan.parse(plan, 3), facts))
    short, long = ([one.bytes_sent for one in records(folders[0], f"run-{steps}")] for steps in (2, 5))
    if plan == "tp=3" and long[4] > 1.2 * planned:
        planned *= 3 / 2  # by what was measured of the links, sums of three ranks go in one hop and not in two
    assert long[4] == pytest.approx(planned, rel=0.02)
    # A run's first record has what its links were measured with, which is as much as fits in a time.
    wire, counted = sent[1] - sent[0], (sum(long) - sum(short)) * TLS
    assert abs(wire - counted) <= 0.005 * counted + again, (wire, counted, again)


def leaving(hosts: Hosts) -> int:
    """TCP payload that has left all hosts so far, ours and TLS's."""
    count = 0
    for number in range(len(hosts.names)):
        (link,) = json.loads(subprocess.check_output(hosts.command(number, "ip", "-s", "-j", "link", "show", "eth0")))
        count += link["stats64"]["tx"]["bytes"] - HEADERS * link["stats64"]["tx"]["packets"]
    return count


def resent(hosts: Hosts) -> int:
    """Bytes at the most that TCP has sent twice so far: a host that is held up acknowledges too late."""
    count = 0
    for number in range(len(hosts.names)):
        names, values = (
            line.split()
            for line in subprocess.check_output(hosts.command(number, "cat", "/proc/net/snmp"), text=True).splitlines()
            if line.startswith("Tcp:")
        )
        count += int(values[names.index("RetransSegs")])
    return SEGMENT * count
