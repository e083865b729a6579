"""The recipe of the tiny model is started by `make tiny-model`, and writes where the package has the model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.house.tree import ROOT
from tllm.recipes import tiny_model


def test_make_gives_it_the_words_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    line = re.search(r"tllm\.recipes\.tiny_model (.*)", (ROOT / "Makefile").read_text())
    assert line is not None
    monkeypatch.setattr(sys, "argv", ["tiny_model", *line[1].split()])

    def begun() -> list[str]:
        raise InterruptedError

    monkeypatch.setattr(tiny_model, "texts", begun)
    with pytest.raises(InterruptedError):
        tiny_model.main()


def test_a_model_takes_the_place_of_the_last_one_behind_a_link(tmp_path: Path) -> None:
    """`models/tiny` of a checkout is such a link."""
    folder, link = tmp_path / "package" / "tiny", tmp_path / "tiny"
    folder.mkdir(parents=True)
    (folder / "tllm.manifest.json").write_text("{}")
    (folder / "of_the_last.json").write_text("{}")
    link.symlink_to(folder)
    tiny_model.save(tiny_model.fresh_model(0), Tokenizer(models.BPE()), link)
    assert link.is_symlink() and (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
    assert not (folder / "of_the_last.json").exists()
