"""Whoever listens on the network learns nothing: all traffic between hosts is captured and searched.

The same run over plain links, and the same question to the HTTP server from another host, show that the search finds
what there is to find.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from tests.house.tree import ROOT
from tests.support.cluster.commands import Running, run_module, running
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.cluster.packet_capture import Capture, check_encrypted, others, seen, windows
from tests.support.cluster.plain_wires import Runs
from tests.support.training.runs import final
from tests.support.training.small_job import write_job
from tllm.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

KEY = "a-key-of-this-test"
MODEL = ROOT / "models" / "tiny"
PROMPT = "def __init__(self, name, parent=None):\n    self.name = "
OTHER = "class Reader:\n    def read(self, size=-1):\n        return "
TOKENS = 24
PLAN = "dp=2,zero=1"
ASK = "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[1], sys.argv[3].encode(), {'authorization': \
'Bearer ' + sys.argv[2], 'content-type': 'application/json'})).read().decode())"
HIDDEN = 'mount -t tmpfs none "$0" && exec "$@"'
"""A command for one process that lacks what is in a folder: `ip netns exec` gives it mounts of its own."""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@contextlib.contextmanager
def serving(hosts: Hosts) -> Iterator[str]:
    """A server on host 0 with one stage on host 1, which has no model; its URL."""
    words = ["serve", str(MODEL), "--nodes", "2", "--host", hosts.addresses[0], "--api-key", KEY, "--threads", "1"]
    with running(*words, "--cluster-host", hosts.addresses[0], host=hosts.command(0)) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        without = hosts.command(1, "sh", "-c", HIDDEN, str(MODEL))
        with running("join", line[1], "--token", line[2], "--threads", "1", host=without):
            yield str(server.until(r"serving .* at (\S+)")[1])
            assert server.interrupt()[0] == 0


def ask(hosts: Hosts, host: int, url: str, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    words = hosts.command(host, sys.executable, "-c", ASK, f"{url}/completions", KEY, json.dumps(body))
    reply = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return str(reply["choices"][0]["text"])


def in_clear(hosts: Hosts, *words: str, file: Path) -> tuple[Runs, Capture, str]:
    """A run over plain links on one host: what was sent, what was captured, what it said."""
    with Capture(hosts.names[0]) as capture:
        done = run_module("tests.support.cluster.plain_wires", *words, str(file), host=hosts.command(0))
    assert done.returncode == 0, done.stderr
    return msgspec.msgpack.decode(file.read_bytes(), type=Runs), capture, done.stdout


def check_nothing_shows(flows: Collection[bytes], packets: Sequence[bytes], needles: Runs) -> None:
    """Only TLS on the wire, and none of these bytes."""
    assert others(packets) == []
    assert sum(map(check_encrypted, flows)) > 100
    assert seen(needles, [*flows, *packets]) == {}


def spelled(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def texts(*found: str) -> list[bytes]:
    """As they stand in JSON."""
    return [json.dumps(text)[1:-1].encode() for text in found]


def weights(folder: Path) -> list[bytes]:
    """Runs of bytes from all over the model's files."""
    return [run for file in sorted(folder.glob("*.safetensors")) for run in windows(file.read_bytes(), count=64)]


def ids_of(text: str) -> bytes:
    """The token ids of a text as they stand in a message."""
    tokenizer = Tokenizer.from_folder(MODEL)
    assert tokenizer is not None
    return b"".join(map(msgspec.msgpack.encode, tokenizer.encode(text)))


@pytest.mark.slow
def test_serving_shows_no_text_no_ids_no_weights_and_no_activations(tmp_path: Path) -> None:
    """Between the nodes, that is: the HTTP port speaks no TLS, so a question from another host is found."""
    with Hosts(2) as hosts:
        with Capture(hosts.switch) as capture, serving(hosts) as url:
            reply, count = ask(hosts, 0, url, PROMPT), len(capture.packets)
            heard = ask(hosts, 1, url, OTHER)
        sent, plain, said = in_clear(hosts, "serve", str(MODEL), "pp=2", PROMPT, str(TOKENS), file=tmp_path / "sent")
    assert said == reply, "the plain run is another"
    flows = capture.streams()
    http = {flow: flows.pop(flow) for flow in list(flows) if url.split("/")[2] in map(spelled, flow)}
    needles = {**sent, "text": texts(PROMPT, reply), "ids": [ids_of(PROMPT)], "weights": weights(MODEL)}
    check_nothing_shows(flows.values(), capture.packets[:count], needles)
    carried = sum(map(len, flows.values()))
    assert carried > 0.4 * (MODEL / "model.safetensors").stat().st_size, "the weights did not cross the wire"

    assert seen({"text": texts(OTHER, heard)}, http.values()) == {"text": 2}
    with pytest.raises(AssertionError, match="no TLS record"):
        check_encrypted(next(iter(http.values())))
    assert set(sent) == {"messages", "torch.bfloat16"}
    counts = {kind: len(runs) for kind, runs in sent.items() if runs}
    assert seen({**sent, "ids": [ids_of(PROMPT)]}, plain.streams().values()) == {**counts, "ids": 1}


@contextlib.contextmanager
def joined(hosts: Hosts, folder: Path, line: re.Match[str]) -> Iterator[Running]:
    folder.mkdir()
    host = hosts.command(1, "env", "-C", str(folder))
    with running("join", line[1], "--token", line[2], "--threads", "1", host=host) as node:
        yield node


def learn(hosts: Hosts, folder: Path, *words: str) -> None:
    """`tllm train` on host 0 with a replica on host 1."""
    words = (*words, "--nodes", "2", "--cluster-host", hosts.addresses[0], "--threads", "1", "--quiet")
    line = r"tllm join (\S+) --token (\S+)"
    with (
        running("train", "job.toml", *words, host=hosts.command(0, "env", "-C", str(folder))) as command,
        joined(hosts, folder / "other", command.until(line)) as node,
    ):
        code, said = command.wait()
        assert code == 0, said
        assert node.wait()[0] == 0


def test_training_shows_no_rows_no_gradients_and_no_weights(tmp_path: Path) -> None:
    config = dict(initializer_range=0.02)  # as `train` begins a model
    job = write_job(tmp_path, config, output_dir="run", max_steps=4, save_steps=4, deterministic=True)
    alone = tmp_path / "alone"
    with Hosts(2) as hosts:
        with Capture(hosts.switch) as capture:
            learn(hosts, tmp_path, "--plan", PLAN)
        sent, plain, _ = in_clear(hosts, "train", str(job), PLAN, str(alone), file=tmp_path / "sent")
    ours, theirs = final(tmp_path / "run"), final(alone)
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items()), "the plain run is another"
    learned = {"weights": weights(tmp_path / "run" / "final")}
    rows = {"text": windows((tmp_path / "pages.jsonl").read_bytes(), count=64)}
    check_nothing_shows(capture.streams().values(), capture.packets, {**sent, **learned, **rows})
    counts = {kind: len(runs) for kind, runs in sent.items() if runs}
    assert seen(sent, plain.streams().values()) == counts
    assert "torch.float32" in sent and seen(learned, plain.streams().values())
