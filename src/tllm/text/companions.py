"""Files of a model's folder that go with it, whatever its weights, and those that say the same of a GGUF model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tllm.core.gguf_files import open_gguf
from tllm.text.generation_config import FILE as GENERATION
from tllm.text.generation_config import read_generation_config
from tllm.text.tokenizer import Tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
COMPANIONS = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja", GENERATION)


def copy_companions(model: Path, folder: Path) -> None:
    """Put the companions of a model, a folder or a GGUF file, into a folder. OSError where they cannot be written."""
    if open_gguf(model) is None:
        for name in COMPANIONS:
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
        return
    if (tokenizer := Tokenizer.from_folder(model)) is not None:
        (folder / TOKENIZER).write_text(tokenizer.inner.to_str(pretty=True), "utf-8")
        _write(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config})
    if chosen := read_generation_config(model).given:
        _write(folder / GENERATION, chosen)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
