"""The first machine's process is killed: what was asked of other nodes' HTTP servers goes on, and more is answered.

Replies that may be taken up are, with the same bytes.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.support.cluster.commands import EXACT, Running, running
from tests.support.models.adapters import save_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # starts several processes that load torch

TINY = Path(__file__).parents[3] / "models" / "tiny"
ASKED = {"prompt": "x = ", "max_tokens": 200, "ignore_eos": True, "return_token_ids": True, "stream": True}
SAMPLED = {**ASKED, "temperature": 0.8, "seed": 7}
STORED = {**ASKED, "temperature": 0, "store": True, "max_tokens": 20}
SHOWN = 6
"""Events that a client has before the first machine is killed."""


def ids_of(line: str) -> list[int]:
    """The tokens of one event of a completion."""
    if not line.startswith("data: {"):
        return []
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event
    return [id for choice in event["choices"] for id in choice.get("token_ids") or ()]


def completed(url: str, asked: dict[str, Any], after: int = 0, then: Callable[[], None] = lambda: None) -> list[int]:
    """The tokens of a streamed completion; `then` happens after so many events with tokens."""
    ids, seen = list[int](), 0
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            new = ids_of(line)
            ids += new
            seen += bool(new)
            if new and seen == after:
                then()
    return ids


def replicas(url: str) -> int:
    """How many processes have the coordinator's state."""
    return len((httpx.get(f"{url}/v1/cluster", timeout=60).json()["replicas"] or {"nodes": ()})["nodes"])


def name_of(lines: list[str]) -> str:
    """What a reply is called by, from its events."""
    name: str = json.loads(next(line for line in lines if line.startswith("data: {")).removeprefix("data: "))["id"]
    return name


def taken_up(url: str, name: str) -> str:
    """A reply's events from its first on."""
    reply = httpx.get(f"{url}/v1/completions/{name}", headers={"accept": "text/event-stream"}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.text


def killed(node: Running) -> None:
    node.process.send_signal(signal.SIGKILL)
    node.process.wait()


def test_requests_go_on_when_the_first_machine_is_killed(tmp_path: Path) -> None:
    adapters = [f"near={save_adapter(TINY, tmp_path / 'near')}", f"far={save_adapter(TINY, tmp_path / 'far', 2)}"]
    with ExitStack() as stack:
        words = ["--nodes", "3", "--plan", "pp=3", "--threads", "1", "--cluster-host", "127.0.0.1", "--port", "0"]
        words += [*EXACT, "--enable-lora", "--max-loras", "2", "--lora-modules", *adapters]
        server = stack.enter_context(running("serve", str(TINY), *words))
        line = server.until(r"tllm join (\S+) --token (\S+)")
        nodes = []
        for name in ("north", "south"):
            joining = [line[1], "--token", line[2], "--name", name, "--threads", "1", "--serve", "--port", "0"]
            nodes.append(stack.enter_context(running("join", *joining)))
        north, south = (node.until(r"serving tiny at (\S+)/v1")[1] for node in nodes)
        undisturbed = [completed(north, asked) for asked in (ASKED | {"temperature": 0}, SAMPLED)]
        adapted = completed(south, ASKED | {"temperature": 0, "model": "near"})
        assert adapted != undisturbed[0]
        while replicas(north) < 3:
            time.sleep(0.2)
        shutil.rmtree(tmp_path / "far")  # as on a machine that never had it

        stored = httpx.post(f"{north}/v1/completions", json=STORED, timeout=60).text
        name = name_of(stored.splitlines())
        events = list[str]()
        with httpx.stream("POST", f"{north}/v1/completions", json=SAMPLED | {"store": True}, timeout=60) as broken:
            for line in broken.iter_lines():
                events.append(line)
                if len(events) > 2 * SHOWN:
                    break
        running_name = name_of(events)

        began = time.monotonic()
        assert completed(south, SAMPLED, SHOWN, lambda: killed(server)) == undisturbed[1]
        print(f"from the kill to the last token: {time.monotonic() - began:.1f} s")
        assert completed(north, ASKED | {"temperature": 0}) == undisturbed[0]
        assert completed(north, ASKED | {"temperature": 0, "model": "near"}) == adapted
        refused = httpx.post(f"{north}/v1/completions", json=ASKED | {"model": "far"}, timeout=60)
        assert refused.status_code == 404, refused.text
        for url in (north, south):
            assert taken_up(url, name) == stored, "a reply that had ended is kept, to the byte"
            again = taken_up(url, running_name).splitlines()
            assert again[: len(events)] == events
            assert [token for line in again for token in ids_of(line)] == undisturbed[1]
            assert httpx.get(f"{url}/health/ready", timeout=60).json() == {"status": "ready"}
            seated = [
                node for node in httpx.get(f"{url}/v1/cluster", timeout=60).json()["nodes"] if node["rank"] is not None
            ]
            assert sorted(node["node"] for node in seated) == ["north", "south"]


def test_replies_of_the_first_machine_outlive_its_office(tmp_path: Path) -> None:
    """It stands still until another machine coordinates, and its clients stay: a stream, a reply that is told as a
    whole, and a stream that is kept."""
    with ExitStack() as stack:
        words = ["--nodes", "3", "--plan", "pp=3", "--threads", "1", "--cluster-host", "127.0.0.1", "--port", "0"]
        server = stack.enter_context(running("serve", str(TINY), *words, *EXACT))
        line = server.until(r"tllm join (\S+) --token (\S+)")
        for name in ("north", "south"):
            joining = [line[1], "--token", line[2], "--name", name, "--threads", "1", "--serve", "--port", "0"]
            node = stack.enter_context(running("join", *joining))
        first = server.until(r"serving tiny at (\S+)/v1")[1]
        other = node.until(r"serving tiny at (\S+)/v1")[1]
        undisturbed = completed(first, SAMPLED)
        while replicas(first) < 3:
            time.sleep(0.2)
        pool = stack.enter_context(ThreadPoolExecutor())
        begun = Event()
        kept = pool.submit(completed, first, SAMPLED | {"store": True}, 1, begun.set)
        whole = pool.submit(httpx.post, f"{first}/v1/completions", json=SAMPLED | {"stream": False}, timeout=60)
        assert begun.wait(60)
        while httpx.get(f"{first}/health/progress", timeout=60).json()["running"] < 2:
            if kept.done() or whole.done():  # on a busy machine one may have ended before anybody looked
                break
            time.sleep(0.01)

        def stand_still() -> None:
            server.process.send_signal(signal.SIGSTOP)
            until_another_coordinates(other)
            server.process.send_signal(signal.SIGCONT)

        assert completed(first, SAMPLED, SHOWN, stand_still) == undisturbed
        assert kept.result() == undisturbed
        assert whole.result().json()["choices"][0]["token_ids"] == undisturbed
        again = server.until(r"serving tiny at (\S+)/v1")[1]
        assert completed(again, SAMPLED) == undisturbed


def until_another_coordinates(url: str) -> None:
    """Until the node that answers there has another coordinator, which is in a later term."""
    while True:
        with suppress(httpx.HTTPError):
            told = httpx.get(f"{url}/v1/cluster", timeout=5).json()
            if (told.get("replicas") or {"term": 0})["term"] > 1:
                return
        time.sleep(0.2)
