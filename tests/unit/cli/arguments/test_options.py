"""Options come to the engine that was asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tllm.api.engine_options import engine_config
from tllm.cli.arguments.options import add_engine, engine_options


@pytest.mark.parametrize(
    ("words", "is_on"), [([], True), (["--enable-prefix-caching"], True), (["--no-enable-prefix-caching"], False)]
)
def test_prefix_caching_can_be_switched_off(words: list[str], is_on: bool, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    parser = argparse.ArgumentParser()
    add_engine(parser)
    options = engine_options(parser.parse_args([str(tmp_path), *words]))
    assert options.enable_prefix_caching == is_on
    assert engine_config(options).enable_prefix_caching == is_on
