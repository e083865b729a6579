"""`tllm simulate`: what it prints of a step, of a ring and of failures, and one clear line for each fault."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tllm.cli.main import main

CLUSTER = """
[link]
latency = "20 us"
bandwidth = "10 Gbit/s"

[[node]]
name = "box"
count = 32
devices = 4
memory = "16 GB"
memory_bandwidth = "200 GB/s"
flops = { bfloat16 = "10 Tflop/s", float8 = "20 Tflop/s" }
efficiency = [[8, 0.2], [64, 0.5]]
inside = { latency = "5 us", bandwidth = "20 GB/s" }

[execution]
collectives = "levels"
beside = { tp = 0.5 }
slowdown = 1.1

[failures]
between = "100 d"
save = "20 s"
restart = "5 min"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "big.toml"
    path.write_text(CLUSTER)
    return path


def simulate(model: Path, cluster: Path, *more: str) -> int:
    return main(["simulate", str(model), "--cluster", str(cluster), *more])


STEP = ("--batch", "128", "--seq", "64", "--plan", "pp=2,tp=4,dp=16,sequence=true,zero=2")


def test_a_step_is_told(folder: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "step.svg"
    assert simulate(folder, cluster, *STEP, "--svg", str(picture)) == 0
    text = capsys.readouterr().out
    for words in ("128 devices on 32 nodes", "ops of 128 ranks", "s a step", "MFU", "stages", "gradients", "useful"):
        assert words in text
    root = ElementTree.fromstring(picture.read_text())
    assert sum(one.tag.endswith("rect") for one in root.iter()) > 2 * 2 * 8
    last = [line for line in text.splitlines() if line.startswith("rank ") and "|" in line]
    assert len(last) == 2 and all(letter in last[0] for letter in "FBS")


def test_the_file_alone_is_enough_and_eight_bits_are_faster(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for more in ([], ["--products", "float8"]):
        assert simulate(folder / "config.json", cluster, *STEP, "--json", *more) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["seconds"] < found[0]["seconds"]
    assert found[0]["ranks"] == 128 and found[0]["replicas_played"] == 1
    for one in found[0]["time"]:
        assert sum(value for key, value in one.items() if key != "rank") == pytest.approx(found[0]["seconds"])


def test_saves_of_ones_own_are_worse_than_the_best(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for more in ([], ["--save-every", "5 min"], ["--save-every", "10 h"]):
        assert simulate(folder, cluster, *STEP, "--json", *more) == 0
        found.append(json.loads(capsys.readouterr().out)["failures"])
    best, often, rarely = found
    assert best["interval"] == best["best"] and often["interval"] == 300
    assert best["useful"] > max(often["useful"], rarely["useful"])
    assert best["between"] == pytest.approx(100 * 86400 / 32)


def test_without_a_plan_the_best_is_looked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.toml"
    small.write_text(CLUSTER.replace("count = 32", "count = 1").replace("devices = 4", "devices = 2"))
    assert simulate(folder, small, "--batch", "8", "--seq", "32", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ranks"] in (1, 2)


def test_without_a_plan_many_devices_get_an_even_one(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(folder, cluster, "--batch", "128", "--seq", "64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 128 and all(one["total"] < 16e9 for one in found["memory"])
    assert simulate(folder, cluster, *STEP, "--json") == 0
    assert found["seconds"] <= json.loads(capsys.readouterr().out)["seconds"]


def test_a_ring_is_told(folder: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--goal", "serve", "--plan", "pp=3,tp=2", "--concurrency", "4", "--prompt", "8", "--reply", "16")
    assert simulate(folder, cluster, *asked, "--svg", str(tmp_path / "ring.svg")) == 0
    text = capsys.readouterr().out
    assert "3 batches in flight" in text and "ms a token" in text and "waiting" in text
    assert (tmp_path / "ring.svg").read_text().count("<rect") >= 27
    found = []
    for more in ([], ["--weight-bits", "4.5", "--message-bits", "8"]):
        assert simulate(folder, cluster, *asked, "--json", *more) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["milliseconds_per_token"] < found[0]["milliseconds_per_token"]
    whole = 1e-3 * found[0]["milliseconds_per_token"] * 16
    assert found[0]["ring"]["seconds"] == pytest.approx(whole, rel=0.2), "but for the first round"


def test_the_ring_of_a_model_that_embeds_has_its_prompts(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    asked = ("--goal", "serve", "--plan", "pp=3,tp=2", "--concurrency", "40", "--prompt", "64")
    assert simulate(folder, cluster, *asked) == 0
    text = capsys.readouterr().out
    assert "an answer after" in text and "3 batches in flight" in text and "all prompts' time" in text
    assert "a token" not in text.replace("1 token each", "")
    assert simulate(folder, cluster, *asked, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["milliseconds_per_token"] is None
    assert told["ring"]["seconds"] == pytest.approx(40 / told["tokens_per_second"], rel=0.2)


@pytest.mark.parametrize(
    ("change", "more", "code", "words"),
    [
        (("", ""), ("--plan", "dp=129"), 3, "129 ranks and the cluster 128 devices"),
        (("", ""), (*STEP, "--rank", "200"), 2, "--rank 200 computes nothing"),
        (("", ""), (*STEP, "--products", "int4"), 2, "no speed in int4"),
        (("", ""), (*STEP, "--save-every", "0 s"), 2, "--save-every is 0 s and must be more than 0"),
        (("[failures]\nbetween", "[fail]\nbetween"), STEP, 2, "unknown field `fail`"),
        (('save = "20 s"', 'save = "0 s"'), STEP, 2, "save of [failures] is 0 seconds"),
        (("slowdown = 1.1", "slowdown = 0.5"), STEP, 2, "slowdown of [execution] is 0.5"),
        (("beside = { tp = 0.5 }", "beside = { pp = 0.5 }"), STEP, 2, "beside of [execution] has pp = 0.5"),
        (('collectives = "levels"', 'collectives = "tree"'), STEP, 2, "Invalid enum value 'tree'"),
    ],
)
def test_faults_get_one_clear_line(
    folder: Path,
    cluster: Path,
    change: tuple[str, str],
    more: tuple[str, ...],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.write_text(CLUSTER.replace(*change) if change[0] else CLUSTER)
    assert simulate(folder, cluster, *more) == code
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 2, "the fault, and a hint"


@pytest.mark.parametrize(("wish", "is_less"), [("int4", True), (None, False)])
def test_weights_of_few_bits_are_read_sooner(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str], wish: str | None, is_less: bool
) -> None:
    found = []
    for more in ((), ("--quantize", wish) if wish else ("--dequantize",)):
        assert simulate(folder, cluster, "--goal", "serve", "--plan", "pp=2", "--json", *more) == 0
        told = json.loads(capsys.readouterr().out)
        found.append((told["milliseconds_per_token"], told["memory"][0]["weights"]))
    assert (found[1] < found[0]) is is_less and (found[1] == found[0]) is not is_less
