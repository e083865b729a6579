from __future__ import annotations

import re
from typing import Any

from tllm.cli.display.live_screen import KEPT, LiveHistory, live_screen

NODES: list[dict[str, Any]] = [
    {
        "node": name,
        "rank": rank,
        "stage": rank,
        "layers": [3 * rank, 3 * rank + 3],
        "phase": "ready",
        "reason": "",
        "rss_bytes": 300 << 20,
        "loading": {"done": 0, "total": 0},
    }
    for rank, name in enumerate(("lab-1", "lab-2"))
]
STATUS: dict[str, Any] = {"model": "m", "ready": True, "plan": "pp=2", "fault": "", "trouble": "", "nodes": NODES}


def sample(number: int, **more: Any) -> dict[str, Any]:
    return {
        "number": number,
        "seconds": 2.0,
        "running": 3,
        "waiting": 1,
        "kv_usage": 0.25,
        "generation_tokens": 40,
        "inter_token_latency": {"count": 4, "median": 0.05, "p95": 0.06, "max": 0.07},
        "time_to_answer": None,
        "nodes": {"lab-1": {"busy": 0.5, "step": 0.004}, "lab-2": {"busy": 1.0, "step": None}},
        "links": {"0>1": 4096, "1>0": 0},
        **more,
    }


def reply(*samples: dict[str, Any], run: str = "one", **more: Any) -> dict[str, Any]:
    nothing = {"events": [], "sequences": [], "waits_for": "", "seconds_since_step": 0.0}
    return {"run": run, "samples": list(samples), **nothing, **more}


def screen(status: dict[str, Any], *replies: dict[str, Any]) -> str:
    history = LiveHistory()
    for one in replies:
        history.add(one)
    return live_screen(status, history)


def test_a_machine_s_row_says_what_it_did_lately() -> None:
    shown = screen(STATUS, reply(sample(0), sample(1)))
    row = next(line for line in shown.splitlines() if line.startswith("lab-1"))
    assert re.split(r" {2,}", row) == [
        "lab-1",
        "0 to 2",
        "█████·····",
        "50 %",
        "4.0 ms",
        "300.0 MiB",
        "2.0 KiB/s",
        "ready",
    ]
    assert re.split(r" {2,}", shown.splitlines()[3])[:4] == ["node", "layers", "computing", "a step"]
    assert "3 sequences run, 1 waits; 25 % of the KV cache is used" in shown
    assert "tokens per second: 20.0\n" in shown
    assert "no sequence in hand" in shown


def test_predictions_stand_beside() -> None:
    planned = {"tokens_per_second": 9.0, "per_token": 0.04, "stages": [0.003, 0.005]}
    shown = screen({**STATUS, "predicted": planned}, reply(sample(0), sample(1)))
    assert "tokens per second: 20.0 (predicted 9.0)" in shown
    assert "between tokens (predicted 40.0)" in shown
    assert "3.0 ms" in shown and "5.0 ms" in shown
    beside = {"predicted": {"tokens_per_second": 21.0, "per_token": 0.05}}
    assert "20.0 (predicted 21.0)" in screen(
        {**STATUS, "predicted": {**planned, "beside": beside}}, reply(sample(0), sample(1))
    )


def test_prompts_that_are_pooled_are_counted_as_answers() -> None:
    """Beside what is predicted of answers; where tokens come too, as they did to be shown."""
    latency = {"count": 12, "median": 0.07, "p95": 0.08, "max": 0.09}
    pooled = {"generation_tokens": 0, "inter_token_latency": None, "time_to_answer": latency}
    planned = {"first_token": 0.04, "per_token": None, "tokens_per_second": 9.0, "stages": [0.003, 0.005]}
    told = reply(sample(0, **pooled), sample(1, **pooled))
    shown = screen({**STATUS, "predicted": planned}, told)
    assert "answers per second: 6.0 (predicted 9.0)" in shown
    assert "milliseconds to an answer (predicted 40.0)" in shown
    assert "between tokens" not in shown and "tokens per second" not in shown
    assert "answers per second: 6.0\n" in screen({**STATUS, "predicted": {**planned, "per_token": 0.1}}, told)
    both = reply(sample(0), sample(1, **pooled))
    assert "tokens per second: 10.0\n" in screen({**STATUS, "predicted": planned}, both)
    nothing = {**pooled, "time_to_answer": None}
    quiet = screen({**STATUS, "predicted": planned}, reply(sample(0, **nothing), sample(1, **nothing)))
    assert "answers per second: 0.0 (predicted 9.0)" in quiet and "milliseconds" not in quiet


def test_the_machine_at_fault_is_named() -> None:
    waits = reply(sample(0), waits_for="lab-2", seconds_since_step=7.4)
    assert re.search(r"^lab-2 .* waited for since 7 s$", screen(STATUS, waits), re.MULTILINE)
    lost = [NODES[0], {**NODES[1], "phase": "lost", "reason": "went away"}]
    assert re.search(r"^lab-2 .* lost: went away$", screen({**STATUS, "nodes": lost}, reply(sample(0))), re.MULTILINE)
    troubled = screen(
        {**STATUS, "ready": False, "doing": "mends epoch 1", "trouble": "lab-2 went away"}, reply(sample(0))
    )
    assert troubled.startswith("m: not ready: mends epoch 1, plan pp=2\ntrouble: lab-2 went away\n")


def test_events_come_newest_first_and_sequences_oldest_first() -> None:
    events = [{"number": n, "time": 0.0, "severity": "error", "text": f"event {n}"} for n in range(20)]
    open_ones = [
        {
            "id": f"{n:032x}",
            "age": 5.0 - n / 10,
            "prompt_tokens": 7,
            "output_tokens": n,
            "first_token": 0.5 if n else None,
        }
        for n in range(10)
    ]
    shown = screen(STATUS, reply(sample(0), events=events, sequences=open_ones))
    assert re.findall(r"✗ event (\d+)", shown) == [str(n) for n in range(19, 11, -1)]
    assert "not yet" in shown and "and 2 more" in shown


def test_only_news_is_asked_for_and_only_the_newest_kept() -> None:
    history = LiveHistory()
    assert history.path == "/v1/cluster/live?after=-1&events_after=-1"
    assert history.add(reply(*map(sample, range(KEPT + 5)), events=[{"number": 3}]))
    assert history.path == f"/v1/cluster/live?after={KEPT + 4}&events_after=3"
    assert len(history.samples) == KEPT
    assert not history.add(reply(run="two")), "another start of the server: what was kept is no more"
    assert history.path == "/v1/cluster/live?after=-1&events_after=-1"


def test_a_server_that_has_nothing_yet() -> None:
    assert screen({**STATUS, "nodes": [], "plan": "", "ready": False, "doing": "waits for 2 nodes"}, reply()) == (
        "m: not ready: waits for 2 nodes, plan none yet\n\nno sequence in hand"
    )
