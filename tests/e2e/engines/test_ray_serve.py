"""A real Ray Serve: requests go to a whole cluster and replies come back as they do without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import ROOT
from tests.support.cluster.commands import tllm
from tests.support.cluster.processes import command, descendants
from tests.support.cluster.ray_cluster import Ray, ray_cluster
from tllm.recipes.bench.processes import free_row

MISSING = [name for name in ("ray", "fastapi", "aiohttp", "watchfiles") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"ray[serve] is not installed here ({', '.join(MISSING)})"),
]
WORDS = ["--prompt-ids", "1,2,3", "--max-tokens", "40", "--ignore-eos", "--json"]
BODY = dict(prompt=[1, 2, 3], max_tokens=40, temperature=0, ignore_eos=True, return_token_ids=True)


@contextlib.contextmanager
def application(ray: Ray, folder: Path, prefix: str = "/", **args: Any) -> Iterator[str]:
    """The application by a config file of Serve; its URL, when it answers."""
    port = free_row(1)
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "llm", "import_path": "tllm.cli.ray_serve:app", "route_prefix": prefix, "args": args},
        ],
    }
    (folder / "serve.yaml").write_text(json.dumps(config))
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ray.environment, "PYTHONPATH": path}
    words = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(folder / "serve.yaml")]
    log, url = folder / "serve.log", f"http://127.0.0.1:{port}{prefix.rstrip('/')}"
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out, env=environment, cwd=folder) as process:
        try:
            until_ready(url, log, process)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(90)


def until_ready(url: str, log: Path, process: subprocess.Popen[bytes] | None = None, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            read(f"{url}/health/ready").close()
            return
        except OSError:
            assert time.monotonic() < end and (process is None or process.poll() is None), log.read_text()
            time.sleep(0.2)


def read(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=60)


def generated(url: str) -> float:
    """Tokens, since the cluster began."""
    with read(f"{url}/metrics") as reply:
        found = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def until_still(url: str) -> None:
    """Until nothing is generated any more."""
    before = -1.0
    while (now := generated(url)) != before:
        before = now
        time.sleep(0.5)


def served() -> list[int]:
    return [pid for pid in descendants() if "tllm.cli.ray_serve" in command(pid)]


def test_a_cluster_on_one_node_answers_streams_and_is_replaced_when_it_dies(tmp_path: Path) -> None:
    folder = ROOT / "models" / "tiny"  # whose replies are long enough to be left
    whole = json.loads(tllm("generate", str(folder), *WORDS).stdout)["token_ids"]
    with ray_cluster(dict(num_cpus=2)) as ray:
        with application(ray, tmp_path, "/llm", model=str(folder), plan="pp=2", threads=1, num_cpus=2) as url:
            with read(f"{url}/v1/completions", BODY) as reply:
                assert json.load(reply)["choices"][0]["token_ids"] == whole
            ids, arrived = list[int](), list[float]()
            with read(f"{url}/v1/completions", {**BODY, "stream": True}) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                for line in stream:
                    if line.startswith(b"data: {"):
                        ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                        arrived.append(time.monotonic())
            assert ids == whole and arrived[-1] > arrived[0]
            with pytest.raises(urllib.error.HTTPError) as refused:
                read(f"{url}/v1/completions", {**BODY, "max_tokens": -1})
            assert refused.value.code == 400 and "max_tokens" in refused.value.read().decode()
            before_it = generated(url)
            with read(f"{url}/v1/completions", {**BODY, "max_tokens": 480, "stream": True}) as stream:
                assert stream.readline().startswith(b"data: {")
            until_still(url)
            assert generated(url) - before_it < 480, "who goes away ends the request"
            (before,) = served()
            os.kill(before, signal.SIGKILL)
            end = time.monotonic() + 90
            while not (set(served()) - {before}):
                assert time.monotonic() < end, (tmp_path / "serve.log").read_text()
                time.sleep(0.2)
            until_ready(url, tmp_path / "serve.log")
            with read(f"{url}/v1/completions", BODY) as reply:
                assert json.load(reply)["choices"][0]["token_ids"] == whole
        assert not served(), "the cluster has ended with the application"


def test_ranks_on_nodes_of_ray(folder: Path, tmp_path: Path) -> None:
    whole = json.loads(tllm("generate", str(folder), *WORDS).stdout)["token_ids"]
    with (
        ray_cluster(dict(num_cpus=1), dict(num_cpus=1)) as ray,
        application(ray, tmp_path, model=str(folder), plan="pp=2", nodes=2, threads=1) as url,
    ):
        with read(f"{url}/v1/cluster") as reply:
            nodes = [node for node in json.load(reply)["nodes"] if node["rank"] is not None]
        assert {node["labels"]["ray_node"] for node in nodes} == set(ray.ids)
        with read(f"{url}/v1/completions", BODY) as reply:
            assert json.load(reply)["choices"][0]["token_ids"] == whole
