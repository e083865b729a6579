"""`--enable-lora` and what goes with it, before anything is started."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tllm.cli.arguments.lora_arguments import add_lora, lora_modules
from tllm.core.errors import ConfigError


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name", action="append", default=[])
    add_lora(parser)
    return parser.parse_args(given)


def test_adapters_have_names(adapter: Path) -> None:
    args = parsed("--enable-lora", "--lora-modules", f"a={adapter}", f"b={adapter}")
    assert lora_modules(args) == {"a": str(adapter), "b": str(adapter)}
    assert (args.max_loras, args.max_lora_rank) == (None, 16)
    assert lora_modules(parsed()) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--lora-modules a={}", "--lora-modules is given and adapters are not served"),
        ("--max-loras 2", "--max-loras is given and adapters are not served"),
        ("--enable-lora --lora-modules {}", "each is NAME=FOLDER"),
        ("--enable-lora --lora-modules a={} a={}", "each is NAME=FOLDER"),
        ("--enable-lora --served-model-name a --lora-modules a={}", "each is NAME=FOLDER"),
        ("--enable-lora --lora-modules a={}/none", "has no adapter_config.json"),
        ("--enable-lora --max-loras 1 --lora-modules a={0} b={0}", "names 2 adapters and --max-loras is 1"),
    ],
)
def test_what_does_not_go_together_is_refused(given: str, words: str, adapter: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        lora_modules(parsed(*given.replace("{0}", "{}").replace("{}", str(adapter)).split()))
    assert words in caught.value.message
