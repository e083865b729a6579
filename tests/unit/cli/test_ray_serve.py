"""What arguments of an application of Ray Serve mean to `tllm serve`."""

from __future__ import annotations

import argparse

import pytest

from tllm.cli.arguments.parser import Parser
from tllm.cli.commands import serve
from tllm.cli.ray_serve import ON_BY_ITSELF, serve_words
from tllm.core.errors import ConfigError


def test_arguments_are_options_of_tllm_serve() -> None:
    assert serve_words({"model": "m", "plan": "pp=2", "replicas": "2", "num_cpus": 4}) == ["m", "--plan", "pp=2"]
    args = {"model": "m", "nodes": 3, "quiet": True, "replan": "false", "lora_modules": ["a=x", "b=y"]}
    wanted = ["m", "--nodes", "3", "--quiet", "--lora-modules", "a=x", "--lora-modules", "b=y", "--on", "ray"]
    assert serve_words(args) == wanted


def test_false_switches_off_what_is_on_by_itself() -> None:
    for false in (False, "false"):
        assert serve_words({"model": "m", "enable_prefix_caching": false}) == ["m", "--no-enable-prefix-caching"]
    parser = Parser("tllm serve", "A command.")
    serve.add_arguments(parser)
    both = [action for action in parser._actions if isinstance(action, argparse.BooleanOptionalAction)]
    assert {action.dest for action in both if action.default} == set(ON_BY_ITSELF)


def test_what_a_replica_gives_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="the application has no model"):
        serve_words({"plan": "pp=2"})
    with pytest.raises(ConfigError, match="port is what a replica gives itself"):
        serve_words({"model": "m", "port": "80"})
