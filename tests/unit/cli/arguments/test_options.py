"""Options come to the engine that was asked for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tllm.api.engine_options import engine_config
from tllm.api.engine_options import engine_options as api_options
from tllm.cli.arguments.options import add_engine, engine_options
from tllm.cluster.settings import EngineSettings
from tllm.core.errors import ConfigError
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


def test_a_draft_model_comes_to_the_first_rank(tmp_path: Path) -> None:
    for name, seed in (("target", 0), ("draft", 1)):
        save_model("llama", tmp_path / name, seed)
    parser = argparse.ArgumentParser()
    add_engine(parser)
    asked = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
    args = parser.parse_args([str(tmp_path / "target"), "--speculative-config", asked])
    assert args.num_speculative_tokens == 3
    config = engine_config(engine_options(args))
    settings = serving_workload(tmp_path / "target", "pp=2", config).settings
    assert isinstance(settings, EngineSettings) and settings.speculative_config is not None
    assert settings.num_speculative_tokens == 3 and settings.speculative_config.model == str(tmp_path / "draft")
    model = serving_rank._draft_model(settings, serving_rank._limits(settings, spec_of(tmp_path / "target")))
    assert model is not None and model.limits.max_model_len == 256
    gone = msgspec.structs.replace(settings.speculative_config, model=str(tmp_path / "gone"))
    elsewhere = msgspec.structs.replace(settings, speculative_config=gone)
    assert serving_rank._draft_model(elsewhere, serving_rank._limits(settings, spec_of(tmp_path / "target"))) is None


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "target")
    save_model("llama", tmp_path / "draft", vocab_size=90)
    drafts = {"model": str(tmp_path / "draft")}
    with pytest.raises(ConfigError, match=r"has 90 tokens and the model .* has 101"):
        api_options(tmp_path / "target", speculative_config=drafts)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 4, and speculative_config says 5"):
        api_options(tmp_path / "target", speculative_config=drafts, num_speculative_tokens=4)
