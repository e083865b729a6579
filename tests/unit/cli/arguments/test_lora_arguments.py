"""`--enable-lora` and what goes with it, before anything is started."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.models.adapters import save_adapter
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tllm.cli.arguments.lora_arguments import add_lora, add_one_lora, check_loras, one_lora, served_loras
from tllm.core.errors import ConfigError, WeightsError
from tllm.spec.lora.lora_config import ServedLoras


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
    both = ["--enable-lora", "--lora-modules", f"a={adapter}", f"b={adapter}"]
    folders = {"a": str(adapter), "b": str(adapter)}
    assert served_loras(parsed(*both)) == ServedLoras(2, 16, folders)
    assert served_loras(parsed(*both, "--max-loras", "3", "--max-lora-rank", "8")) == ServedLoras(3, 8, folders)
    again = ["--enable-lora", "--lora-modules", f"a={adapter}", "--lora-modules", f"b={adapter}"]
    assert served_loras(parsed(*again)) == ServedLoras(2, 16, folders), "as an application of Ray Serve writes a list"
    assert served_loras(parsed("--enable-lora")) == ServedLoras(1, 16, {}), "those that are loaded later"
    assert served_loras(parsed()) is None


def test_folders_are_those_of_any_process(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes this process's place runs in another folder."""
    monkeypatch.chdir(adapter.parent)
    known = served_loras(parsed("--enable-lora", "--lora-modules", f"a={adapter.name}"))
    assert known is not None and known.paths == {"a": str(adapter)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--lora-modules a={}", "--lora-modules is given and adapters are not served"),
        ("--max-loras 2", "--max-loras is given and adapters are not served"),
        ("--enable-lora --lora-modules {}", "each is NAME=FOLDER"),
        ("--enable-lora --lora-modules a={} a={}", "each is NAME=FOLDER"),
        ("--enable-lora --served-model-name a --lora-modules a={}", "each is NAME=FOLDER"),
        ("--enable-lora --lora-modules a={}/none", "/none is no folder here"),
        ("--enable-lora --lora-modules a={}/..", "has no adapter_config.json"),
        ("--enable-lora --lora-modules a=~nobody-of-this-name/a", "is no path here"),
        ("--enable-lora --max-loras 1 --lora-modules a={0} b={0}", "names 2 adapters and --max-loras is 1"),
    ],
)
def test_what_does_not_go_together_is_refused(given: str, words: str, adapter: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        served_loras(parsed(*given.replace("{0}", "{}").replace("{}", str(adapter)).split()))
    assert words in caught.value.message


def test_an_adapter_is_looked_at_before_the_model_is_loaded(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    spec = spec_of(tmp_path / "model")
    save_adapter(tmp_path / "model", tmp_path / "a", rank=20)
    parser = argparse.ArgumentParser()
    add_one_lora(parser)
    known = one_lora(parser.parse_args(["--lora-modules", f"a={tmp_path / 'a'}"]), spec)
    assert known is not None and known.paths == {"a": str(tmp_path / "a")}, "of any rank"
    assert one_lora(parser.parse_args([]), spec) is None
    with pytest.raises(ConfigError, match=r"/a: the adapter has rank 20 and adapters up to rank 16 are served"):
        check_loras(ServedLoras(1, 16, known.paths), spec)
    save_model("llama_mha_tied_bias", tmp_path / "other")
    with pytest.raises(WeightsError, match=r"/a: .* has shape"):
        check_loras(known, spec_of(tmp_path / "other"))
