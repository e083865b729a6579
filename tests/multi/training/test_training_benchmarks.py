"""The benchmarks of training, with a tiny model: all contenders do the same work, and what is said of them is right."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.models import random_llama as shapes
from benchmarks.training import slow_links as slow_links_benchmark
from benchmarks.training import throughput as training_benchmark
from benchmarks.training import torch_trainers as peers
from tests.support.cluster.hosts import why_not

RANK = """
import json, sys
print("{}", flush=True)
sys.stdin.readline()
print(json.dumps({"seconds": int(sys.argv[1]), "losses": [int(sys.argv[1])], "sent": int(sys.argv[1])}))
"""

pytestmark = pytest.mark.timeout(300)  # several processes import torch, one after the other on a busy core


@pytest.fixture
def training() -> ModuleType:
    return training_benchmark


@pytest.fixture
def slow_links() -> ModuleType:
    return slow_links_benchmark


@pytest.mark.soak  # the benchmark checks the same of its own runs
@pytest.mark.parametrize(
    "picked", [pytest.param(("threads: 1",), id="alone"), pytest.param(("zero=3, TLS", "FSDP2"), id="zero3")]
)
def test_contenders_learn_the_same_from_the_same_rows(
    training: ModuleType, picked: tuple[str, ...], tmp_path: Path
) -> None:
    work = training.Work("tiny", 32, 2, tmp_path)
    commands = {
        name: of_name
        for some in training.matches(work, "float32")
        for name, of_name in some.items()
        if any(part in name for part in picked)
    }
    with training.contenders(commands, tmp_path / "logs") as started:
        raw = training.take_turns(started, steps=2, rounds=1)
    assert [len(report["losses"]) for report in raw[next(iter(raw))]] == [1, 2]
    first, *others = raw
    for name in others:
        for mine, theirs in zip(raw[name], raw[first], strict=True):
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=training.SAME)
    if "plain loop, threads: 1" in raw:
        training.check_losses(raw)
        raw["tllm, threads: 1"][1]["losses"][1] *= 1 + 2 * training.SAME
        with pytest.raises(AssertionError, match="tllm, threads: 1 has a loss of"):
            training.check_losses(raw)


def test_a_contender_that_ends_says_why(training: ModuleType, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(SystemExit, match="ended with 1:\\nno such model"),
        training.contenders({"one": (1, [words])}, tmp_path),
    ):
        pass


def test_a_step_has_taken_as_long_as_its_slowest_rank(training: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [[sys.executable, str(script), number] for number in ("1", "3")]
    with training.contenders({"two": (1, ranks)}, tmp_path) as started:
        assert started["two"].take(1) == {"seconds": 3, "losses": [2.0], "sent": 1}


def test_the_plain_model_is_that_of_transformers(tmp_path: Path) -> None:
    folder = shapes.model_folder("tiny", tmp_path, torch.float32)
    ids_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    plain = peers.plain_model(folder, 24)
    loss, theirs = peers.transformers_model(folder)
    plain(ids_BT).backward()
    loss(ids_BT).backward()
    torch.testing.assert_close(plain(ids_BT), loss(ids_BT), rtol=1e-6, atol=0)
    want = theirs.model.layers[1].mlp.down_proj.weight.grad
    assert (plain.layers[1].down.weight.grad - want).norm() < 1e-5 * want.norm()


def test_ratios_are_of_rounds_that_count_and_of_the_tokens_of_all_ranks(training: ModuleType) -> None:
    def reports(*seconds: float) -> list[dict[str, object]]:
        return [{"seconds": 99.0, "losses": [1.0]}, *({"seconds": s, "losses": [1.0, 1.0]} for s in seconds)]

    raw = {"tllm dp=2": reports(1.0, 2.0, 4.0), "DDP, 2 ranks": reports(2.0, 2.0, 2.0)}
    assert training.rates(raw, "tllm dp=2", 10) == [40.0, 20.0, 10.0]
    assert "| tllm dp=2 | 20 |" in training.table({"float32": raw}, 10)


def test_what_is_hidden_is_all_where_both_take_as_long_as_the_longer(slow_links: ModuleType) -> None:
    assert slow_links.hidden(1.0, 0.5, 1.0) == 1.0
    assert slow_links.hidden(1.0, 4.0, 5.0) == 0.0
    assert slow_links.hidden(1.0, 4.0, 4.5) == 0.5


def test_tables_of_slow_links_say_what_was_reported(slow_links: ModuleType) -> None:
    def reports(seconds: float, losses: list[float], sent: int) -> list[dict[str, object]]:
        return [{"seconds": 99.0, "losses": [9.0], "sent": 1}, {"seconds": seconds, "losses": losses, "sent": sent}]

    names = ("computing alone", "sums alone")
    took = {
        f"{who}, {name}": seconds for who in ("tllm", "DDP") for name, seconds in zip(names, (1.0, 4.0), strict=True)
    }
    raw = {
        name: reports(seconds, [9.0], 50_000_000) for name, seconds in (took | {"tllm dp=2": 4.5, "DDP": 5.0}).items()
    }
    lines = slow_links.overlap_table("100mbit", raw).splitlines()
    assert lines[2:] == [
        "| tllm dp=2 | 4.00 | 1.00 | 4.00 | 4.00 | 4.50 | 50 % |",
        "| DDP | 4.00 | 1.00 | 4.00 | 4.00 | 5.00 | 0 % |",
    ]
    less = {"exact": reports(4.0, [9.0], 800), "int8": reports(2.0, [9.0, 9.0], 400)}
    learned = {"exact": [{"seconds": 60.0, "losses": [5.0, 2.0]}], "int8": [{"seconds": 30.0, "losses": [5.0, 2.2]}]}
    lines = slow_links.less_table(less, learned, 100).splitlines()
    assert lines[2:] == [
        "| exact | 25 | 1.00 | 800 | 2.000 | +0.0 % | 60.0 |",
        "| int8 | 100 | 4.00 | 200 | 2.200 | +10.0 % | 30.0 |",
    ]
    assert slow_links.less_table(less, {}, 100).endswith("| int8 | 100 | 4.00 | 200 |  |  |  |")


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
@pytest.mark.soak  # `test_the_wires_carry_what_the_formulas_say` counts bytes of a link in `make test`
@pytest.mark.parametrize(("name", "least", "most"), [("int8", 0.25, 0.27), ("exact", 1.0, 1.02)])
def test_a_way_sends_over_the_link_what_it_should(
    slow_links: ModuleType, name: str, least: float, most: float, tmp_path: Path
) -> None:
    """In a step, as a part of the gradient in float32."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question. " * 50)
    work = slow_links.TextWork("tiny", 32, 2, tmp_path, text, 3)
    first, second = slow_links.turns(work, name, slow_links.WAYS[name], 1, 2)
    assert second["losses"][-1] < first["losses"][0]
    assert least < second["sent"] / 2 / (4 * 119_104) < most
