"""`tllm generate` as a user runs it, on a small random model, whole and cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from tests.support.cluster.commands import tllm
from tests.support.selection import soak_but

PLANS = ("pp=2,tp=1+2,layers=1+3", "tp=3,shares=1:2:1")


def generate(folder: Path, *more: str) -> dict[str, object]:
    done = tllm("generate", str(folder), "--prompt-ids", "1,2,3", "--max-tokens", "16", "--json", *more)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


pytestmark = pytest.mark.timeout(300)  # each starts several processes that load torch


@pytest.mark.parametrize("plan", soak_but(PLANS[:1], PLANS))
def test_a_cut_model_gives_the_ids_of_the_whole_one(folder: Path, plan: str) -> None:
    whole, cut = generate(folder), generate(folder, "--plan", plan)
    assert len(whole["token_ids"]) == 16  # type: ignore[arg-type]
    assert cut["token_ids"] == whole["token_ids"]


def test_a_torn_weight_file_is_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = tllm("generate", str(tmp_path), "--prompt-ids", "1")
    assert done.returncode == 6
    assert done.stderr.startswith("error: ")
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads(folder: Path) -> None:
    command = f"{sys.executable} -m tllm.cli plan {folder} --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


@pytest.mark.soak  # the demonstration of a wheel is run by `test_wheel`
def test_demonstration(folder: Path, tmp_path: Path) -> None:
    """On another model, since the one that ships need not be here; with a tokenizer of two hundred bytes."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocabulary = {chr(0x100 + i): i for i in range(101)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(tmp_path / "tokenizer.json"))
    model = ("--model", str(tmp_path), "--prompt", "\u0101\u0102", "--max-tokens", "20")
    done = tllm("demo", *model, "--steps", "6")
    assert done.returncode == 0, done.stderr
    assert "stage 1: layers [2, 4)" in done.stdout
    assert done.stdout.count("all 20 tokens of 3 processes are those of one") == 2
    assert "in 6 steps" in done.stdout
