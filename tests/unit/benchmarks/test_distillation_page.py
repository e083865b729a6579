"""What the benchmark of a teacher and its student makes of runs, and of a teacher's weights and answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.models.peaked_llama import peaked_head
from benchmarks.training.distillation import LOGITS, Work, figures, of_rounds, page, sent_of_model
from benchmarks.training.distilled_peer import KEPT, KeptAnswer, Replay
from tests.support.models.families import save_model
from tllm.training.job.job_file import read_job
from tllm.training.report.metrics import StepRecord
from tllm.training.teachers.teacher_messages import Answer, Question, packed
from tllm.training.teachers.top_k_choice import entropy

SETTINGS: dict[str, Any] = dict(
    student="30m", teacher="60m", rate="100mbit", delay=5.0, budget=0.1, top_k=64, log_probs="uint8", rounds=2
)
SETTINGS |= dict(steps=4, warm=1, length=128, batch=4)


def run(*seconds: float, nbytes: float = 1000.0, told: float = 900.0, lost: float = 0.09) -> dict[str, Any]:
    return dict(seconds=seconds, bytes=nbytes, packets=2.0, told=told, lost=lost, top_k=150.0)


def raw(**runs: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {
        "apart": [dict(student=2.0, teacher=1.0, rows=30), dict(student=2.2, teacher=1.1, rows=30)],
        "100 Mbit/s": [run(2.0, 2.2), run(2.2, 2.2)],
        "delayed": [run(4.0), run(4.4)],
        "queue of one": [run(3.0), run(3.3)],
        "all logits": [run(9.0, nbytes=130_000.0)],
    }
    budget = dict(budget=0.1, dtype="uint8", bytes=640.0, tokens=100.0, lost=0.09)
    sent = dict(title="made up", vocabulary=32_000, entropy=2.5, spread=[1.0, 2.5, 4.0], sent=[budget])
    return {"settings": SETTINGS, "runs": found | runs, "sent": [sent]}


def cells(text: str) -> dict[str, list[str]]:
    lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    return {line[0]: line[1:] for line in lines if line}


def test_overlap_is_the_longer_of_both_alone_beside_a_step() -> None:
    found = of_rounds(raw(), "100 Mbit/s")
    assert found["step"] == pytest.approx(2.15), "the median of 2.1 and 2.2"
    assert found["overlap"] == pytest.approx((2.0 / 2.1 + 1.0) / 2), "each round beside its own times alone"
    assert found["hidden"] == pytest.approx((0.9 + 1.0) / 2), "of 1 s beside 2 s all but 0.1 s; of 1.1 s all"
    nothing = of_rounds(raw(), "queue of one")
    assert nothing["hidden"] == pytest.approx(0.0) and nothing["overlap"] == pytest.approx(2 / 3)


def test_the_page_says_what_is_behind_the_aims_and_nothing_else() -> None:
    made = page(raw())
    table = cells(made.table)
    assert table["student alone"][0] == "2.100"
    assert table["100 Mbit/s"][1:] == ["97.6 %", "95.0 %", "1,000", "900", "64.0", "0.0900", "150"]
    assert table["100 Mbit/s, all logits"][-3:] == ["0.5", "", ""]
    assert table["made up, 32,000 tokens"][-1] == "100.0", "64,000 bytes beside 640"
    assert "100 Mbit/s and 5 ms the overlap is 50.0 %" in made.limits
    assert "Over 100 Mbit/s the" not in made.limits and "times fewer, and" not in made.limits
    behind = page(raw(**{"100 Mbit/s": [run(2.0, nbytes=LOGITS / 49, lost=0.11)] * 2})).limits
    assert "Over 100 Mbit/s bytes are 49.0 times fewer, and 50 is the aim." in behind
    assert "0.1100 nats are lost, and the budget is 0.1." in behind


def test_bytes_are_of_all_tokens_of_a_run_and_seconds_of_the_steps_that_count(tmp_path: Path) -> None:
    metrics = dict(teacher_bytes_per_token=800.0, teacher_kl=0.08, teacher_top_k=130.0)
    fields: dict[str, Any] = dict(
        loss=1.0, grad_norm=1.0, learning_rate=1e-4, tokens=512, tokens_per_second=1.0, metrics=metrics
    )
    records = [StepRecord(step=step + 1, seconds=step + 1.0, **fields) for step in range(4)]
    counted = dict(received_bytes=2_000_000, sent_bytes=32_000, received_packets=2000, sent_packets=32)
    work = Work(tmp_path, tmp_path, tmp_path, argparse.Namespace(warm=2, budget=0.1, log_probs="uint8"))
    found = figures(records, work, counted)
    assert found["seconds"] == [3.0, 4.0]
    assert found["bytes"] == 2_032_000 / (4 * 4 * 127) and found["packets"] == 2032 / (4 * 4 * 127)
    assert (found["told"], found["lost"], found["top_k"]) == (800.0, 0.08, 130.0)
    job = read_job(work.job("one", "10.77.0.2:7070", 64, 5)).job
    assert job.distill is not None and job.distill.log_prob_dtype == "uint8" and job.max_steps == 5
    everything = read_job(work.job("all", "10.77.0.2:7070", 0, 5)).job
    assert everything.distill is not None and everything.distill.kl_budget == 0.0


def test_places_of_the_made_up_teacher_are_sure_and_unsure() -> None:
    x_PD = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    x_PD /= x_PD.pow(2).mean(-1, keepdim=True).sqrt()
    of_places = entropy(x_PD @ peaked_head(4000, 64).T)
    assert 1.5 < float(of_places.mean()) < 3.5
    assert float(of_places.quantile(0.1)) < 1.5 and float(of_places.quantile(0.9)) > 3.5


def test_a_budget_sends_fewer_bytes_the_more_it_may_lose(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    found = sent_of_model("small", str(tmp_path), None, 40)
    assert found["vocabulary"] == 101 and 0 < found["entropy"] < np.log(101)
    assert all(one["lost"] <= one["budget"] * (1 + 1e-6) for one in found["sent"])
    for dtype in ("float32", "uint8"):
        sizes = [one["bytes"] for one in found["sent"] if one["dtype"] == dtype]
        assert len(sizes) == 2 and sizes[0] > sizes[1]
    exact, coded = found["sent"][:2]
    assert coded["bytes"] < exact["bytes"]


def test_answers_that_are_kept_are_given_to_the_same_rows_only() -> None:
    row, other = (Question(number, packed(np.array([number, 8])), (2,), packed(np.array([0]))) for number in (3, 4))
    kept = KEPT.decode(msgspec.msgpack.encode([KeptAnswer(row, Answer(3, ids=b"ab"))]))
    replay = Replay(kept)
    assert replay.answer(msgspec.structs.replace(row, number=9)) == Answer(9, ids=b"ab")
    with pytest.raises(KeyError):
        replay.answer(other)
