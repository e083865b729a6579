"""A GGUF model of the hub: plans read its header alone, and of two nodes each fetches its own part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.support.cluster.commands import EXACT, running, tllm
from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.hub.this_machine import environment, use_hub
from tests.support.models.gguf_models import SavedModel, with_tokenizer, write_gguf
from tests.support.serving.completions import completed
from tllm.core.gguf_header import STEP
from tllm.hub.locate import locate
from tllm.spec.hf_config import read_config

pytestmark = pytest.mark.timeout(240)  # starts several processes that load torch

TINY = ROOT / "models" / "tiny"
NAME = "org/tiny-GGUF:F32"
ASKED = ("--prompt-ids", "1,2,3,4,5", "--max-tokens", "24", "--json")
CHUNK = 64 * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files in a folder of their own, as the large ones are."""
    place = tmp_path_factory.mktemp("repository") / "F32"
    place.mkdir()
    return write_gguf(SavedModel(TINY), place / "tiny-F32.gguf", metadata=with_tokenizer(TINY), split=30)


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    with fake_hub() as running_hub:
        running_hub.add(NAME.partition(":")[0], model.parent.parent)
        yield running_hub


def sizes(model: Path) -> list[int]:
    return [path.stat().st_size for path in model.parent.iterdir()]


def test_a_plan_reads_the_headers_alone(
    hub: FakeHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, tmp_path, hub)
    found = locate(NAME, "config")
    assert found.weights is None and found.said.endswith("of its weights nothing is needed")
    assert hub.weights_sent() == len(sizes(model)) * STEP
    assert read_config(found.path) == read_config(model)
    hub.sent.clear()
    shared = locate(NAME, "ranges").weights
    assert shared is not None and shared.nbytes == sum(sizes(model))
    assert not hub.sent, "the headers are kept"
    whole = locate(NAME, "whole")
    assert whole.path.read_bytes() == model.read_bytes()
    assert locate(NAME, "ranges").weights is None, "it is all here now"


def test_each_node_fetches_its_own_part(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    truth = json.loads(tllm("generate", str(model), *ASKED).stdout)["token_ids"]
    homes = [tmp_path / name for name in ("first", "second")]
    first, second = (environment(home, hub, home.name) for home in homes)
    words = ["--nodes", "2", "--plan", "pp=2", "--cluster-host", "127.0.0.1", "--port", "0", *EXACT]
    with running("serve", NAME, *words, env=first) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        with running("join", line[1], "--token", line[2], "--name", "second", env=second) as node:
            url = server.until(r"serving \S+ at (\S+)")[1]
            assert completed(url, (1, 2, 3, 4, 5), 24) == truth
            assert server.interrupt()[0] == 0
            node.wait()
    parts = [hub.weights_sent(home.name) for home in homes]
    size, embedding = sum(sizes(model)), 2048 * 160 * 4
    heads = 2 * len(sizes(model)) * STEP  # for config and tokenizer, and for the nodes that ask where tensors are
    # The embedding is the first stage's table and the last one's head.
    assert 0 <= sum(parts) - size - embedding <= heads + 8 * CHUNK, (parts, size)
    assert 0.35 * size < parts[1] < 0.65 * size
    blobs = [path for home in homes for path in home.rglob("*") if path.is_file() and path.stat().st_size > STEP]
    assert not blobs, "no machine has a whole file"
