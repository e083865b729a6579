from __future__ import annotations

from tllm.server.http.metrics import Metrics


def test_statistics_of_several_things_are_told_apart_by_labels() -> None:
    metrics = Metrics("m")
    metrics.render({"weights_bytes/east/coordinator": 5.0, "epoch": 1.0})
    lines = (
        metrics.render({"weights_bytes/east/coordinator": 7.0, "weights_bytes/west/east": 3.0}).decode().splitlines()
    )
    told = [line for line in lines if line.startswith("tllm_")]
    labels = 'engine="0",model_name="m"'
    assert f'tllm_weights_bytes{{{labels},node="east",source="coordinator"}} 7.0' in told
    assert f'tllm_weights_bytes{{{labels},node="west",source="east"}} 3.0' in told
    assert f"tllm_epoch{{{labels}}} 1.0" in told


def test_prometheus_is_told_what_a_statistic_is() -> None:
    """Its page said "Engine statistic epoch"; the words stood in the reference alone."""
    shown = Metrics("m").render({"epoch": 1.0, "memory_bytes/a": 2.0}).decode()
    assert "# HELP tllm_epoch How many times the cluster has formed with another set of nodes or another plan" in shown
    assert "# HELP tllm_memory_bytes Bytes of memory that a node gives to the cluster" in shown
    assert "Engine statistic" not in shown
