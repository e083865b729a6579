"""`tllm plan --goal`: what it prints, and one clear line for each fault of a cluster file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tllm.cli.main import main

CLUSTER = """
[link]
latency = "0.2 ms"
bandwidth = "1 Gbit/s"

[[node]]
name = "box"
count = 2
memory = "2 GB"
memory_bandwidth = "20 GB/s"
flops = { bfloat16 = "100 Gflop/s", float32 = "50 Gflop/s" }

[[node]]
name = "slow"
memory = "1 GB"
memory_bandwidth = "100 MB/s"
flops = { bfloat16 = "1 Gflop/s", float32 = "1 Gflop/s" }
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def plan(folder: Path, cluster: Path, *more: str) -> int:
    return main(["plan", str(folder), "--cluster", str(cluster), *more])


def test_serving_plans_are_compared(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert plan(folder, cluster, "--goal", "serve", "--explain", "--svg", str(tmp_path / "ring.svg")) == 0
    text = capsys.readouterr().out
    for words in ("exact", "ms/token", "the time goes to", "box0", "where a token's time goes", "waiting"):
        assert words in text
    assert (tmp_path / "ring.svg").read_text().count("<rect") >= 2


def test_what_slows_a_plan_down_is_left_out(folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folder, cluster, "--goal", "serve", "--json") == 0
    got = json.loads(capsys.readouterr().out)
    best = got["choices"][0]
    assert got["exact"] and "slow" not in best["nodes"]
    assert best["tokens_per_second"] == max(choice["tokens_per_second"] for choice in got["choices"])
    assert all(sum(one.values()) == 2 * one["total"] for one in best["memory"])


def test_training_plans_are_compared(folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--goal", "train", "--batch", "4", "--seq", "32", "--top", "2")
    assert plan(folder, cluster, *asked, "--explain") == 0
    text = capsys.readouterr().out
    for words in ("s/step", "MFU", "microbatch", "where a step's time goes", "optimizer"):
        assert words in text
    assert plan(folder, cluster, *asked, "--json") == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert len(choices) == 2 and choices[0]["seconds"] <= choices[1]["seconds"]


@pytest.mark.parametrize("goal", ["serve", "train"])
def test_a_plan_that_is_given_is_predicted(
    folder: Path, cluster: Path, goal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder, cluster, "--goal", goal, "--plan", "pp=2", "--seq", "32") == 0
    assert "as given" in capsys.readouterr().out
    assert plan(folder, cluster, "--goal", goal, "--plan", "pp=4") == 3
    assert "4 ranks and the cluster 3 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (("memory = ", "memry = "), 2, "unknown field `memry`"),
        (('"20 GB/s"', '"-20 GB/s"'), 2, "must be more than 0"),
        (('"20 GB/s"', '"20 GB"'), 2, "memory_bandwidth of node 'box' is '20 GB'"),
        (('memory = "2 GB"', "memory = 0"), 2, "memory of node 'box' is 0 and must be more than 0"),
        (('[link]\nlatency = "0.2 ms"\nbandwidth = "1 Gbit/s"', ""), 2, "no link between nodes box0 and box1"),
        (('latency = "0.2 ms"', 'latency = "-1 ms"'), 2, "must not be below 0"),
        (("bfloat16", "float16"), 2, "no speed in bfloat16"),
        (('name = "slow"', 'name = "box0"'), 2, "two nodes 'box0'"),
        (('memory = "2 GB"', 'memory = "300 MB"'), 3, "fits nowhere"),
        (("count = 2", "count = 0"), 2, "has count = 0"),
        (("[[node]]", "[[nodes]]"), 2, "unknown field `nodes`"),
    ],
)
def test_faults_get_one_clear_line(
    folder: Path, cluster: Path, change: tuple[str, str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CLUSTER.replace(*change)
    assert text != CLUSTER
    cluster.write_text(text.replace('memory = "1 GB"', 'memory = "300 MB"') if code == 3 else text)
    assert plan(folder, cluster, "--goal", "serve") == code
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 2, "the fault, and a hint"


def test_a_goal_needs_a_cluster(folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--goal", "serve"]) == 2
    assert "--cluster is left out" in capsys.readouterr().err
    assert plan(folder, cluster) == 2
    assert "--goal is left out" in capsys.readouterr().err
