from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tllm.server.http.settings import ServerSettings
from tllm.server.live.run_log import KEPT_STEPS, RunLog
from tllm.server.run_app import build_run_app


def get(log: RunLog, path: str, **headers: str) -> httpx.Response:
    app = build_run_app(log, lambda: {"training": {}}, ServerSettings(api_keys=("a-long-key",)))

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8000") as http:
            return await http.get(path, headers=headers)

    return asyncio.run(work())


def live(log: RunLog, query: str = "") -> Any:
    return get(log, f"/v1/training/live{query}", authorization="Bearer a-long-key").json()


def test_the_newest_steps_are_kept_and_only_news_is_told() -> None:
    log = RunLog()
    for step in range(KEPT_STEPS + 3):
        log.stepped({"step": step, "loss": 1.5})
    log.told("error", "b went away")
    assert [sample["number"] for sample in live(log)["samples"]] == list(range(3, KEPT_STEPS + 3))
    told = live(log, f"?after={KEPT_STEPS + 1}&events_after=-1")
    assert [sample["record"] for sample in told["samples"]] == [{"step": KEPT_STEPS + 2, "loss": 1.5}]
    assert [(event["severity"], event["text"]) for event in told["events"]] == [("error", "b went away")]
    assert live(log, "?events_after=0")["events"] == []
    assert live(log)["run"] != live(RunLog())["run"]


def test_the_page_needs_no_key_and_what_it_asks_for_does() -> None:
    assert get(RunLog(), "/").status_code == get(RunLog(), "/page/page.js").status_code == 200
    assert get(RunLog(), "/v1/training/live").status_code == get(RunLog(), "/v1/cluster").status_code == 401
    assert get(RunLog(), "/v1/chat/completions", authorization="Bearer a-long-key").status_code == 404
