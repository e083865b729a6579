"""What arguments of an application of Ray Serve mean to `tllm serve`."""

from __future__ import annotations

import pytest

from tllm.cli.ray_serve import serve_words
from tllm.core.errors import ConfigError


def test_arguments_are_options_of_tllm_serve() -> None:
    assert serve_words({"model": "m", "plan": "pp=2", "replicas": "2", "num_cpus": 4}) == ["m", "--plan", "pp=2"]
    args = {"model": "m", "nodes": 3, "quiet": True, "replan": "false", "lora_modules": ["a=x", "b=y"]}
    wanted = ["m", "--nodes", "3", "--quiet", "--lora-modules", "a=x", "--lora-modules", "b=y", "--on", "ray"]
    assert serve_words(args) == wanted


def test_what_a_replica_gives_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="the application has no model"):
        serve_words({"plan": "pp=2"})
    with pytest.raises(ConfigError, match="port is what a replica gives itself"):
        serve_words({"model": "m", "port": "80"})
