"""A model by its name on the hub, over two nodes as users start them: each fetches its own part, and nothing twice."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.house.tree import ROOT
from tests.support.cluster.commands import EXACT, Running, running, tllm
from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.hub.this_machine import environment
from tests.support.serving.completions import completed

pytestmark = pytest.mark.timeout(300)  # each starts several processes that load torch

TINY = ROOT / "models" / "tiny"
NAME = "org/tiny"
SIZE = (TINY / "model.safetensors").stat().st_size
PROMPT = (1, 2, 3, 4, 5)
CHUNK = 64 * 1024


@pytest.fixture(scope="module")
def truth() -> list[int]:
    """What the model in a local folder replies."""
    words = ["generate", str(TINY), "--prompt-ids", ",".join(map(str, PROMPT)), "--max-tokens", "24", "--json"]
    ids: list[int] = json.loads(tllm(*words, *EXACT).stdout)["token_ids"]
    return ids


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running_hub:
        running_hub.add(NAME, TINY)
        yield running_hub


def both_ends() -> int:
    """Bytes of the embedding: the first stage looks tokens up in it, and it is the head of the last one."""
    with safe_open(TINY / "model.safetensors", "pt") as file:
        return int(file.get_tensor("model.embed_tokens.weight").nbytes)


@contextmanager
def two_nodes(first: dict[str, str], second: dict[str, str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server and a node that joined it: the URL, and what they say of both."""
    words = ["--nodes", "2", "--plan", "pp=2", "--cluster-host", "127.0.0.1", "--port", "0"]
    with running("serve", NAME, *words, *EXACT, env=first) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        with running("join", line[1], "--token", line[2], "--name", "second", env=second) as node:
            found = server.until(r"serving (\S+) at (\S+)")
            assert found[1] == NAME
            status = tllm("status", "--json", "--port", found[2].split(":")[2].split("/")[0])
            yield found[2], json.loads(status.stdout)["nodes"]
            assert server.interrupt()[0] == 0
            node.wait()


def test_each_node_fetches_its_own_part_and_keeps_it(hub: FakeHub, truth: list[int], tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("first", "second")]
    online = [environment(home, hub, home.name) for home in homes]
    with two_nodes(*online) as (url, nodes):
        assert completed(url, PROMPT, 24) == truth
        fetched = sum(node["bytes_fetched"] for node in nodes)
        assert 0 <= hub.weights_sent() - fetched <= 2 * CHUNK, "beside the chunks with the header"
    parts = [hub.weights_sent(home.name) for home in homes]
    assert 0 <= sum(parts) - SIZE - both_ends() <= 4 * CHUNK, "each byte once, but for chunks in which both parts lie"
    assert all(0.35 * SIZE < part < 0.65 * SIZE for part in parts), parts
    hub.sent.clear()

    gone = [{**one, "HF_ENDPOINT": "http://127.0.0.1:9"} for one in online]
    with two_nodes(*gone) as (url, nodes):
        assert completed(url, PROMPT, 24) == truth
        assert [node["bytes_fetched"] for node in nodes] == [0, 0]
    assert not hub.sent


def test_a_node_without_the_hub_is_given_its_part(hub: FakeHub, truth: list[int], tmp_path: Path) -> None:
    first, second = environment(tmp_path / "first", hub, "first"), environment(tmp_path / "second", None)
    with two_nodes(first, second) as (url, nodes):
        assert completed(url, PROMPT, 24) == truth
        fetched = {node["node"]: node["bytes_fetched"] for node in nodes}
    assert SIZE <= hub.weights_sent("first") <= SIZE + 4 * CHUNK, "what both need is fetched once"
    assert 0.35 * SIZE < fetched["second"] < 0.65 * SIZE
    assert hub.weights_sent() == hub.weights_sent("first")


@pytest.mark.slow
def test_layers_that_only_other_nodes_have_are_taken_over_when_the_hub_is_gone(
    hub: FakeHub, truth: list[int], tmp_path: Path
) -> None:
    """Two nodes fetched a half each. Then without the hub, three serve, of which one has nothing; it is killed, and one
    that has nothing either takes its layers. In the end a machine is missing that alone has layers."""
    with two_nodes(*(environment(tmp_path / name, hub, name) for name in ("first", "second"))) as (url, _):
        assert completed(url, PROMPT, 24) == truth
    sent = hub.weights_sent()
    hub.status = 503
    first, second, third, fourth = (
        environment(tmp_path / name, hub if name == "first" else None)
        for name in ("first", "second", "third", "fourth")
    )
    words = ["--plan", "pp=3", "--nodes", "3", "--spare-nodes", "1", "--cluster-host", "127.0.0.1", "--port", "0"]
    with ExitStack() as stack:
        server = stack.enter_context(running("serve", NAME, *words, *EXACT, env=first))
        line = server.until(r"tllm join (\S+) --token (\S+)")

        def join(name: str, env: dict[str, str]) -> Running:
            return stack.enter_context(running("join", line[1], "--token", line[2], "--name", name, env=env))

        join("second", second)
        lost = join("third", third)
        url = server.until(r"serving (\S+) at (\S+)")[2]
        assert completed(url, PROMPT, 24) == truth
        assert given_to("third", url) > 0
        join("fourth", fourth)
        until_members(url, 4)
        lost.process.send_signal(signal.SIGKILL)
        lost.wait()
        assert completed(url, PROMPT, 24) == truth
        assert given_to("fourth", url) > 0
        assert server.interrupt()[0] == 0
    assert hub.weights_sent() == sent, "the hub gave nothing"

    words = ["--plan", "pp=2", "--nodes", "2", "--cluster-host", "127.0.0.1", "--port", "0"]
    with running("serve", NAME, *words, *EXACT, env={**first, **environment(tmp_path / "first", None)}) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        fifth = environment(tmp_path / "fifth", None)
        with running("join", line[1], "--token", line[2], "--name", "fifth", env=fifth) as node:
            code, said = server.wait()
            assert code == 6, said
            node.wait()
    assert re.search(r"nobody has layers? .*\b5.* of org/tiny@\w+ \(\d+ of 61 chunks of model.safetensors\)", said), (
        said
    )
    assert "fifth on " in said and "HF_HUB_OFFLINE" in said and "bring the hub back" in said


def given_to(node: str, url: str) -> int:
    """Bytes of weights that a node got from nodes other than the first machine's."""
    ways = status_of(url)["weights"]["brought"]
    return sum(way["bytes"] for way in ways if way["node"] == node and way["source"] in ("second", "third"))


def until_members(url: str, count: int) -> None:
    end = time.monotonic() + 60
    while len(status_of(url)["nodes"]) < count:
        assert time.monotonic() < end, "it did not join"
        time.sleep(0.1)


def status_of(url: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(tllm("status", "--json", "--port", url.split(":")[2].split("/")[0]).stdout)
    return status


def test_what_two_ranks_of_a_machine_need_of_the_same_chunks_comes_once(
    hub: FakeHub, truth: list[int], tmp_path: Path
) -> None:
    words = ["--prompt-ids", ",".join(map(str, PROMPT)), "--max-tokens", "24", "--json", "--plan", "tp=2"]
    made = tllm("generate", NAME, *words, *EXACT, env=environment(tmp_path, hub, "one"))
    assert json.loads(made.stdout)["token_ids"] == truth
    assert SIZE <= hub.weights_sent() <= SIZE + 4 * CHUNK
