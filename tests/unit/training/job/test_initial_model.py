"""What a run may start from."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from tllm.core.errors import ConfigError
from tllm.training.job.initial_model import spec_of
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
