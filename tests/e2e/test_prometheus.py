"""The board and the alarms in `monitoring/`, in a real Prometheus that asks a server of ours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import TOKENIZER, serve
from tllm.recipes.bench.processes import free_row
from tllm.server.http.engine_statistics import COUNTERS, GAUGES, LABELS
from tllm.server.run import bind

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no Prometheus: `apt-get install prometheus`"),
]
MONITORING = Path("monitoring")
BOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
VARIABLES = {"$model_name": ".*", "$__rate_interval": "10s"}
STATISTICS = {*GAUGES, *COUNTERS, "nodes", "losses", "epoch"} | {
    "/".join((key, *(f"some-{label}" for label in labels))) for key, labels in LABELS.items()
}


class GrowingEngine(FakeEngine):
    """Every statistic that there is, each greater whenever it is asked for."""

    asked = count(1)

    def stats(self) -> Mapping[str, float]:
        return dict.fromkeys(STATISTICS, float(next(self.asked)))


class Prometheus:
    """A Prometheus of this machine, with the shipped rules, that asks a server each second."""

    def __init__(self, folder: Path, server: str) -> None:
        config = (MONITORING / "prometheus.yml").read_text()
        assert "127.0.0.1:8000" in config and "5s" in config and "15s" in config
        config = config.replace("127.0.0.1:8000", server).replace("15s", "1s").replace("5s", "1s")
        (folder / "prometheus.yml").write_text(config)
        shutil.copy(MONITORING / "prometheus-rules.yml", folder)
        self.address = f"127.0.0.1:{free_row(1)}"
        words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self.process = subprocess.Popen(
            ["prometheus", *words, f"--web.listen-address={self.address}"], stderr=subprocess.DEVNULL
        )

    def ask(self, path: str, **query: str) -> Any:
        """What its API answers."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success"
        return answer["data"]

    def value(self, expression: str) -> list[Any]:
        """The vector that an expression has now."""
        return list(self.ask("query", query=expression)["result"])

    def wait_for_scrapes(self, number: int) -> None:
        """Until it has asked the server so often."""
        while True:
            try:
                found = self.value('count_over_time(up{job="tllm"}[1m])')
            except OSError:  # it is starting
                found = []
            if found and float(found[0]["value"][1]) >= number:
                return
            assert self.process.poll() is None, "Prometheus has ended"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    engine = GrowingEngine.saying(TOKENIZER, " hello world")
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(serve(engine), lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), address)
    try:
        body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
        asked = urllib.request.Request(f"http://{address}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked):
            started.wait_for_scrapes(3)
        yield started
    finally:
        started.process.terminate()
        started.process.wait()
        server.should_exit = True
        thread.join()
        listening.close()


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    empty = []
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            if not prometheus.value(expression):
                empty.append(f"{panel['title']}: {expression}")
    assert not empty, "\n".join(empty)


def test_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    [group] = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == 9
    assert {rule["health"] for rule in group["rules"]} == {"ok"}, [rule.get("lastError") for rule in group["rules"]]


def test_what_each_node_tells_of_the_whole_cluster_is_not_added_up() -> None:
    """Every node with an HTTP server tells the engine's numbers: of three, sums would be three times what there is."""
    of_the_engine = {name for name, _ in GAUGES.values()} | {f"{name}_total" for name, _ in COUNTERS.values()}
    targets = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    summed = [one for one in targets if one.startswith("sum") and set(re.findall(r"[\w:]+", one)) & of_the_engine]
    once = ("sum(max by (model_name) (", " / sum(")  # of a ratio both are as many times too large
    assert not [one for one in summed if not any(text in one for text in once)]


def test_panels_do_not_cover_one_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


SERIES = '{model_name="m", engine="0", instance="a:1", job="tllm"'
CASES: dict[str, tuple[dict[str, str], str]] = {
    "TllmDown": ({'up{job="tllm", instance="a:1"}': "1 0x30"}, "10m"),
    "TllmRankLost": ({f"tllm_losses{SERIES}}}": "0x15 2x15"}, "17m"),
    "TllmStalled": (
        {f"vllm:num_requests_running{SERIES}}}": "1x30", f"tllm_batches{SERIES}}}": "5x30"},
        "10m",
    ),
    "TllmQueueStands": ({f"vllm:num_requests_waiting{SERIES}}}": "3x30"}, "15m"),
    "TllmCacheFull": (
        {f"vllm:kv_cache_usage_perc{SERIES}}}": "0.99x30", f"vllm:num_preemptions_total{SERIES}}}": "0+1x30"},
        "20m",
    ),
    "TllmSlowFirstToken": (
        {
            f'vllm:time_to_first_token_seconds_bucket{SERIES}, le="{limit}"}}': f"0+{steps}x30"
            for limit, steps in (("20.0", 1), ("40.0", 9), ("80.0", 10), ("+Inf", 10))
        },
        "20m",
    ),
    "TllmBetterPlan": ({f"tllm_plan_gain{SERIES}}}": "0.23x30"}, "20m"),
    "TllmMemoryShort": (
        {f'tllm_rss_bytes{SERIES}, node="b"}}': "97x30", f'tllm_memory_bytes{SERIES}, node="b"}}': "100x30"},
        "20m",
    ),
    "TllmStrangers": ({f"tllm_refused_frames_total{SERIES}}}": "0x5 1x25"}, "7m"),
}


def rule_test(alarm: str, series: Mapping[str, str], at: str, fires: bool) -> dict[str, Any]:
    """A test as promtool takes it: whether an alarm is raised at a time. What it says is not compared."""
    rows = [{"series": name, "values": values} for name, values in series.items()]
    expression = f'count(ALERTS{{alertname="{alarm}", alertstate="firing"}}) or vector(0)'
    samples = [{"labels": "{}", "value": int(fires)}]
    return {
        "interval": "1m",
        "input_series": rows,
        "promql_expr_test": [{"expr": expression, "eval_time": at, "exp_samples": samples}],
    }


def test_alarms_are_raised_when_they_should_and_only_then(tmp_path: Path) -> None:
    well = {
        'up{job="tllm", instance="a:1"}': "1x30",
        f"tllm_losses{SERIES}}}": "2x30",
        f"vllm:num_requests_running{SERIES}}}": "1x30",
        f"tllm_batches{SERIES}}}": "0+500x30",
        f"vllm:generation_tokens_total{SERIES}}}": "5x30",  # others are asked at other nodes
        f"vllm:num_requests_waiting{SERIES}}}": "3x9 0 3x20",
        f"vllm:kv_cache_usage_perc{SERIES}}}": "0.99x30",
        f"vllm:num_preemptions_total{SERIES}}}": "4x30",
        f"tllm_plan_gain{SERIES}}}": "0.05x30",
        f'tllm_rss_bytes{SERIES}, node="b"}}': "80x30",
        f'tllm_memory_bytes{SERIES}, node="b"}}': "100x30",
        f"tllm_refused_frames_total{SERIES}}}": "3x30",
    }
    tests = [rule_test(alarm, series, at, True) for alarm, (series, at) in CASES.items()]
    tests += [rule_test(alarm, well, at, False) for alarm, (_, at) in CASES.items()]
    shutil.copy(MONITORING / "prometheus-rules.yml", tmp_path)
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": ["prometheus-rules.yml"], "evaluation_interval": "15s", "tests": tests}))
    told = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert len(CASES) == (MONITORING / "prometheus-rules.yml").read_text().count("- alert:")
