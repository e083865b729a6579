"""What a run may start from."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import gguf
import pytest

from tests.support.training.post_training.preferences import pair_rows, preference_job, small_model
from tllm.core.errors import ConfigError
from tllm.training.job import initial_model
from tllm.training.job.initial_model import pair_lengths, spec_of
from tllm.training.job.job import Job


def test_a_gguf_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for named in (path, tmp_path):
        with pytest.raises(ConfigError, match="training starts from a Hugging Face folder"):
            spec_of(Job(model_name_or_path=str(named), train_files=("a.txt",), output_dir="run", max_steps=1))


def test_how_long_pairs_are_is_read_from_the_data_where_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word is a token; a reply ends with one more, which its last word predicts."""
    small_model("llama", tmp_path / "model")
    rows = pair_rows(tmp_path / "pairs.jsonl")
    job = preference_job(tmp_path / "model", tmp_path / "run", "dpo")

    def words(rows: list[dict[str, str]], *names: str) -> float:
        return fmean(len(row[name].split()) for row in rows for name in names)

    found = pair_lengths(job)
    assert found == (words(rows, "prompt"), pytest.approx(words(rows, "chosen", "rejected") + 1))
    monkeypatch.setattr(initial_model, "PAIRS_READ", 8)
    few = pair_lengths(job)
    assert few is not None and few.prompt == words(rows[::3], "prompt"), "of all parts of the file"
    assert pair_lengths(preference_job(tmp_path / "model", tmp_path / "run", "kto")) is None
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "w1", "chosen": "w2"}) + "\n")
    monkeypatch.setattr(initial_model, "PAIRS_READ", 100)
    assert pair_lengths(job) is None, "the run tells what is wrong with it"
    for gone in ("model/tokenizer.json", "pairs.jsonl"):
        (tmp_path / gone).unlink()
        assert pair_lengths(job) is None
