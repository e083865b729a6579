"""The hub's library takes most of a second to load, so only a name of the hub loads it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.tree import ROOT


@pytest.mark.parametrize("words", [["--help"], ["plan", str(ROOT / "models" / "tiny"), "--plan", "pp=2"]])
def test_a_path_and_help_do_without_it(words: list[str]) -> None:
    program = (
        "import sys\n"
        "from tllm.cli.main import main\n"
        f"assert main({words!r}) == 0\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'huggingface_hub', 'httpx2', 'tqdm', 'torch'}, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
