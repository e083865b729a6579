"""A GGUF file where a folder is given: the same texts as the folder that it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.support.models.gguf_models import SavedModel, with_tokenizer, write_gguf
from tllm import LLM, SamplingParams
from tllm.cli.main import main
from tllm.core.errors import ConfigError, WeightsError

pytestmark = pytest.mark.usefixtures("own_process")

TINY = ROOT / "models" / "tiny"
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=2)
PROMPTS = ["def main():", "import os\n"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, its bfloat16 weights as they are."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(SavedModel(TINY), path, lambda name: "BF16", with_tokenizer(TINY))


def test_texts_and_chats_are_those_of_the_folder(model: Path) -> None:
    messages = [{"role": "user", "content": "# a comment"}]
    with LLM(TINY) as plain, LLM(model) as ours, LLM(model.parent) as by_folder:
        assert ours.options.dtype == plain.options.dtype == "bfloat16"
        assert ours.options.spec == plain.options.spec
        assert ours.generate(PROMPTS, GREEDY) == plain.generate(PROMPTS, GREEDY) == by_folder.generate(PROMPTS, GREEDY)
        assert ours.chat(messages, GREEDY) == plain.chat(messages, GREEDY)


def test_commands_take_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(model), "--plan", "pp=2"]) == 0
    assert "of weights: BF16 " in capsys.readouterr().out
    assert main(["generate", str(model), "--prompt", "def main():", "--max-tokens", "4", "--json", "--quiet"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert len(reply["token_ids"]) <= 4


def test_a_file_that_is_not_there_or_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder or a GGUF file"):
        LLM(tmp_path / "none.gguf")
    for content, what in (
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (b"PK\3\4 something else", "does not begin with GGUF"),
    ):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(WeightsError, match=what):
            LLM(tmp_path / "bad.gguf")
