"""The beginning of a GGUF file says what the whole says of config and tokenizer, and gives no weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.house.tree import ROOT
from tests.support.models.gguf_models import with_tokenizer, write_gguf
from tllm.core import gguf_header, partial_gguf_files
from tllm.core.errors import WeightsError
from tllm.core.gguf_files import gguf_files, open_gguf, read_range
from tllm.core.partial_gguf_files import keep_head
from tllm.spec.hf_config import read_config
from tllm.text.tokenizer import Tokenizer
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.open_index import open_index

TINY = ROOT / "models" / "tiny"
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in several files, whose positions are scaled by numbers that only a tensor has."""
    monkeypatch.setattr(gguf_header, "STEP", 4096)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
    )
    (tmp_path / "whole").mkdir()
    return write_gguf(LlamaForCausalLM(config), tmp_path / "whole" / "m.gguf", metadata=with_tokenizer(TINY), split=12)


def heads(whole: Path, folder: Path) -> Path:
    for name in gguf_files([path.name for path in whole.parent.iterdir()]):
        keep_head(folder / name, (whole.parent / name).stat().st_size, partial(read_range, whole.parent / name))
    return folder / whole.name


def test_config_and_tokenizer_are_those_of_the_whole(whole: Path, tmp_path: Path) -> None:
    head = heads(whole, tmp_path / "heads")
    assert sum(path.stat().st_size for path in head.parent.iterdir()) < whole.stat().st_size / 4
    assert read_config(head) == read_config(whole)
    assert "factors" in str(read_config(head)), "which are in no header"
    text = "def main(): pass"
    of_heads, of_all = Tokenizer.from_folder(head), Tokenizer.from_folder(whole)
    assert of_heads is not None and of_all is not None
    assert of_heads.encode(text) == of_all.encode(text)
    of_head, of_whole = open_gguf(head), open_gguf(whole)
    assert of_head is not None and of_whole is not None
    assert of_head.header.tensors == of_whole.header.tensors
    assert of_head.bytes_by_type() == of_whole.bytes_by_type()


def test_weights_are_never_read_from_a_head(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"ends at byte \d+ and the file has"):
        open_index(LocalFiles(heads(whole, tmp_path / "heads")), read_config(whole))


def test_what_is_there_is_not_read_again_and_what_is_damaged_is(whole: Path, tmp_path: Path) -> None:
    head = heads(whole, tmp_path / "heads")
    before = head.stat().st_mtime_ns

    def nothing(start: int, stop: int) -> bytes:
        raise AssertionError("it is there")

    keep_head(head, whole.stat().st_size, nothing)
    head.unlink()
    keep_head(head, whole.stat().st_size, partial(read_range, whole))
    assert head.stat().st_mtime_ns != before
    rest = head.with_name(f"{head.name}{partial_gguf_files.REST}")
    rest.write_text("{")
    with pytest.raises(WeightsError, match=r"cannot read .*rest") as wrong:
        read_config(head)
    assert "remove it" in wrong.value.hint
