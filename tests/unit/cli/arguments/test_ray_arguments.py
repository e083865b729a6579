"""Options of Ray are read as Ray's users write them, and what cannot go together is said in one line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tllm.cli.arguments.node_sources import from_elsewhere, from_ray, launched_here
from tllm.cli.arguments.ray_arguments import RAY_ONLY, labels, ray_nodes, resources
from tllm.core.errors import ConfigError
from tllm.node.sources import ray_cluster


def asked(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**{**dict(on=None, nodes=None, local=None, threads=None), **RAY_ONLY, **more})


def test_tables_are_read() -> None:
    assert resources('{"CPU": 8, "gpu_box": 0.5}') == {"CPU": 8.0, "gpu_box": 0.5}
    assert labels('{"zone": "!b", "kind": "in(a, b)"}') == {"zone": "!b", "kind": "in(a, b)"}


@pytest.mark.parametrize("text", ["gpu_box=1", "[1]", "{}", '{"gpu_box": 0}', '{"gpu_box": "1"}', '{"gpu_box": true}'])
def test_what_is_no_table_of_amounts_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        resources(text)


def test_a_label_is_a_text() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a label that is no text"):
        labels('{"zone": 1}')


def test_options_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, said in (
        (asked(ray_address="10.0.0.1:6379"), "--ray-address is for machines of a Ray cluster"),
        (asked(ray_strategy="SPREAD"), "--ray-strategy is for machines of a Ray cluster"),
        (asked(on="ray", local=2), "--local 2 starts processes here, and --on ray"),
        (asked(on="ray", ray_seconds=0.0), "--ray-seconds is 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            launched_here(given)
    for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="7", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="a launcher has started 2 processes, and --on ray"):
        launched_here(asked(on="ray"))


def test_all_nodes_come_from_ray_and_all_but_one_otherwise() -> None:
    assert [from_elsewhere(asked(on=on, nodes=3)) for on in ("ray", None)] == [3, 2]
    assert from_ray(asked()) is None


@pytest.mark.parametrize(("more", "device"), [({"device": "cuda"}, "cuda"), ({}, "cpu")])
def test_workers_compute_on_the_device_that_is_asked_for(
    more: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "RayCluster", lambda address: SimpleNamespace(own_host=lambda: "10.0.0.1"))
    args = asked(on="ray", nodes=2, memory=None, cluster_host="10.0.0.1", **more)
    source, _ = ray_nodes(args)
    assert source._settings.device == device


def test_ray_is_not_loaded_unless_it_is_asked_for() -> None:
    program = (
        "import sys, tllm.node.sources.ray_nodes, tllm.node.sources.ray_worker, tllm.cli.commands.serve\n"
        "assert 'ray' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
