"""Options come to the engine that was asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tllm.api.engine_options import engine_config
from tllm.cli.arguments.options import add_engine, engine_options
from tllm.cluster.settings import EngineSettings
from tllm.node.roles import serving_rank
from tllm.node.serve.open_cluster import serving_workload


@pytest.mark.parametrize(
    ("words", "is_on"), [([], True), (["--enable-prefix-caching"], True), (["--no-enable-prefix-caching"], False)]
)
def test_prefix_caching_can_be_switched_off(words: list[str], is_on: bool, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    parser = argparse.ArgumentParser()
    add_engine(parser)
    options = engine_options(parser.parse_args([str(tmp_path), *words]))
    assert options.enable_prefix_caching == is_on
    config = engine_config(options)
    assert config.enable_prefix_caching == is_on
    settings = serving_workload(tmp_path, "pp=2", config).settings
    assert isinstance(settings, EngineSettings)
    assert serving_rank._limits(settings, spec_of(tmp_path)).enable_prefix_caching == is_on


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_how_the_cache_is_held_reaches_every_rank(kind: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    parser = argparse.ArgumentParser()
    add_engine(parser)
    config = engine_config(engine_options(parser.parse_args([str(tmp_path), "--kv-cache-dtype", kind])))
    settings = serving_workload(tmp_path, "pp=2", config).settings
    assert isinstance(settings, EngineSettings)
    assert serving_rank._limits(settings, spec_of(tmp_path)).kv_cache_dtype == kind
