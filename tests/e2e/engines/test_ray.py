"""A real Ray of several nodes: ids, losses and weights of one machine, though nodes of it die and others come."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.commands import Running, running, tllm
from tests.support.cluster.processes import descendants
from tests.support.cluster.ray_cluster import Ray, ray_cluster
from tests.support.training.small_job import write_job
from tllm.training.report.metrics import read_records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="the package ray is not installed"),
]

ON = ("--on", "ray", "--threads", "1")
ZONE_A: dict[str, Any] = dict(num_cpus=1, resources={"box": 1}, labels={"zone": "a"})


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    """A head that computes nothing, and a node of zone b."""
    with ray_cluster(dict(num_cpus=1, labels={"zone": "b"})) as made:
        yield made


@pytest.fixture
def pair(ray: Ray) -> Iterator[list[int]]:
    """Two nodes of zone a, to which a test may add others; all are gone after it."""
    first = len(ray.ids)
    yield [ray.add(**ZONE_A), ray.add(**ZONE_A)]
    for number in range(first, len(ray.ids)):
        if ray.is_alive(number):
            ray.kill(number)


def read(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=60)


def ray_nodes(url: str) -> dict[str, str]:
    """Ray's own names of the nodes that have a rank."""
    with read(f"{url}/v1/cluster") as reply:
        nodes = json.load(reply)["nodes"]
    assert all(node["labels"]["engine"] == "ray" for node in nodes)
    return {node["node"]: node["labels"].get("ray_node", "") for node in nodes if node["rank"] is not None}


def losses(run: Path) -> dict[int, float]:
    file = run / "metrics.jsonl"
    return {record.step: record.loss for record in read_records(file)} if file.exists() else {}


def until(holds: Callable[[], bool], command: Running, seconds: float = 90.0) -> None:
    """Wait until it holds, unless the command ends or it takes too long."""
    end = time.monotonic() + seconds
    while not holds():
        assert command.process.poll() is None, command.wait()
        assert time.monotonic() < end, command.interrupt()
        time.sleep(0.2)


def tokens_shown() -> list[str]:
    """Join tokens that any process of this test has on its command line or in its environment."""
    found = []
    for place in (Path(f"/proc/{pid}") for pid in descendants()):
        for file in ("cmdline", "environ"):
            try:
                found += re.findall(rb"tllm1-\S+", (place / file).read_bytes())
            except OSError:
                continue
    return [text.decode(errors="replace") for text in found]


def test_a_stream_outlives_a_ray_node_and_another_takes_its_place(ray: Ray, pair: list[int], folder: Path) -> None:
    words = ["--prompt-ids", "1,2,3", "--max-tokens", "200", "--ignore-eos", "--json"]
    whole = json.loads(tllm("generate", str(folder), *words).stdout)["token_ids"]
    asked = ["--ray-labels", '{"zone": "a"}', "--ray-resources", '{"CPU": 1, "box": 1}', "--plan", "pp=2"]
    body = dict(prompt=[1, 2, 3], max_tokens=200, temperature=0, ignore_eos=True, return_token_ids=True, stream=True)
    before = ray.free()
    with running("serve", str(folder), *ON, *asked, "--port", "0", env=ray.environment) as command:
        url = command.until(r"at (http\S+)/v1")[1]
        placed = ray_nodes(url)
        assert set(placed.values()) == {ray.ids[number] for number in pair}, "the nodes of zone a, one rank each"
        assert "box" not in ray.free()
        assert not tokens_shown()
        ids: list[int] = []
        with read(f"{url}/v1/completions", body) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if len(ids) >= 20 and ray.is_alive(pair[0]):
                        ray.kill(pair[0])
        assert ids == whole
        until(lambda: list(ray_nodes(url).values()) == [ray.ids[pair[1]]], command)  # it may be missed after the reply
        ray.add(**ZONE_A)
        until(lambda: set(ray_nodes(url).values()) == {ray.ids[pair[1]], ray.ids[-1]}, command)
        with read(f"{url}/v1/completions", {**body, "stream": False}) as reply:
            assert json.load(reply)["choices"][0]["token_ids"] == whole
        code, said = command.interrupt()
        assert code == 0, said
    assert ray.free().get("CPU") == before["CPU"], "all was given back"


@pytest.mark.soak
def test_a_run_is_stopped_and_outlives_a_ray_node_with_the_losses_and_weights_of_one_machine(
    ray: Ray, pair: list[int], tmp_path: Path
) -> None:
    job = write_job(tmp_path, plan="dp=2", deterministic=True, max_steps=80, save_steps=1000, learning_rate=1e-3)
    alone = tllm("train", str(job), "--local", "2", "--set", f"output_dir={tmp_path / 'alone'}", "--quiet")
    assert alone.returncode == 0, alone.stderr
    run, words = tmp_path / "run", ["train", str(job), *ON, "--nodes", "2", "--ray-labels", '{"zone": "a"}']
    with running(*words, env=ray.environment) as command:
        until(lambda: len(losses(run)) >= 5, command)
        code, said = command.interrupt()
        assert code == 130, said
    (saved,) = run.glob("step-*")
    stopped = int(saved.name.removeprefix("step-"))
    assert 5 <= stopped < 60
    with running(*words, env=ray.environment) as command:
        until(lambda: len(losses(run)) >= stopped + 5, command)
        ray.kill(pair[1])
        killed = len(losses(run))
        assert killed < 75
        code, said = command.wait()
        assert code == 0, said
    assert losses(run) == losses(tmp_path / "alone")
    for file in (tmp_path / "alone" / "final").glob("*.safetensors"):
        assert (run / "final" / file.name).read_bytes() == file.read_bytes()


def test_too_few_nodes_are_said_with_both_numbers(ray: Ray, folder: Path) -> None:
    words = ["serve", str(folder), *ON, "--plan", "pp=2", "--ray-labels", '{"zone": "b"}', "--port", "0"]
    done = tllm(*words, "--nodes", "2", "--ray-seconds", "2", env=ray.environment)
    assert done.returncode == 4
    assert re.search(
        r"error: Ray had no place for 2 nodes with 1 CPU and zone=b each within 2 s: of its \d nodes 1", done.stderr
    )
    assert "hint: free or add nodes" in done.stderr
    done = tllm(*words, "--ray-resources", '{"gpu_box": 2}', env=ray.environment)
    assert done.returncode == 4
    assert re.search(r"error: 0 of the \d nodes of the Ray cluster have 2 gpu_box and 1 CPU and zone=b", done.stderr)
    done = tllm(*words, env=ray.environment)
    assert done.returncode == 3
    assert "has 2 ranks and --nodes is 1" in done.stderr


def test_an_address_without_a_ray_cluster_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    words = ("--ray-address", "127.0.0.1:1")
    done = tllm("serve", str(folder), *ON, "--port", "0", *words, env={"RAY_TMPDIR": str(tmp_path)})
    assert done.returncode == 4, done.stderr
    assert "error: no Ray cluster answers at 127.0.0.1:1: Connection refused" in done.stderr
    assert "`ray start --head`" in done.stderr
