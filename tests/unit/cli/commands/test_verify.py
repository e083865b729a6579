from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tllm.api.engine_options import EngineOptions
from tllm.cli.commands import verify
from tllm.cli.main import main
from tllm.node.verify.verdict import Damaged, Differs, Pass
from tllm.planner.cost.cache_room import RUNTIME_BYTES


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What comparisons find, one after another; each is noted as (dtype, ids)."""
    left: list[Any] = []
    seen: list[Any] = []

    async def listed(folder: Path, plan: object, dtype: str, ids: tuple[int, ...], **more: Any) -> Pass:
        seen.append((dtype, ids))
        return left.pop(0)(dtype)

    monkeypatch.setattr("tllm.node.verify.verify.verify", listed)
    return [left, seen]


def same(dtype: str) -> Pass:
    return Pass(dtype, (), ())


def rounded(dtype: str) -> Pass:
    off = 1e-15 if dtype == "float64" else 1e-3
    return Pass(dtype, (Differs(0, "layer 0", 1, off, off),), ())


def wrong(dtype: str) -> Pass:
    return Pass(dtype, (Differs(1, "layer 3", 4, 1.0, 0.5),), ())


def damaged(dtype: str) -> Pass:
    return Pass(dtype, (), (Damaged(1, "layer 3", "model.layers.3.mlp.up_proj.weight", ""),))


@pytest.mark.parametrize(
    ("passes", "dtypes", "code", "words"),
    [
        ([same], ["bfloat16"], 0, "equal: every layer gives the same bits in bfloat16"),
        ([rounded, rounded], ["bfloat16", "float64"], 0, "in float64 it is 1e-15"),
        ([rounded, wrong], ["bfloat16", "float64"], 1, "not equal: layer 3 on rank 1 differs by 0.5"),
        ([damaged], ["bfloat16"], 1, "rank 1 holds model.layers.3.mlp.up_proj.weight otherwise"),
    ],
)
def test_what_is_said(
    passes: list[Any],
    dtypes: list[str],
    code: int,
    words: str,
    compared: list[Any],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compared[0][:] = passes
    assert main(["verify", str(folder), "--plan", "pp=2", "--quiet"]) == code
    assert words in capsys.readouterr().out
    assert [dtype for dtype, _ in compared[1]] == dtypes
    assert len(compared[1][0][1]) == verify.TOKENS


def test_without_room_float64_is_left_out(
    compared: list[Any], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared[0][:] = [rounded]
    monkeypatch.setattr(verify, "has_room", lambda options, free: False)
    assert main(["verify", str(folder), "--plan", "tp=2", "--quiet"]) == 0
    assert "no memory to compare in float64" in capsys.readouterr().out


def test_float64_is_not_compared_twice(compared: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared[0][:] = [rounded]
    assert main(["verify", str(folder), "--plan", "tp=2", "--dtype", "float64", "--quiet", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"]["equal"] is True
    assert said["passes"][0]["differs"][0]["what"] == "layer 0"


def test_room_for_every_rank(folder: Path) -> None:
    options = options_of(folder)
    runtime = 2 * RUNTIME_BYTES
    assert verify.has_room(options, runtime + 10 * 2**20)
    assert not verify.has_room(options, runtime)


def options_of(folder: Path) -> EngineOptions:
    parser = verify.argparse.ArgumentParser()
    verify.add_arguments(parser)
    return verify.engine_options(parser.parse_args([str(folder), "--plan", "pp=2"]))


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--prompt-ids", "1,999"], 2, "token 999 of a vocabulary of 320"),
        (["--prompt-ids", ",".join(["1"] * 129)], 2, "129 prompt tokens; the context holds 1 to 128"),
        (["--prompt", "x"], 2, "has no tokenizer.json"),
        (["--prompt", "x", "--prompt-ids", "1"], 2, "not allowed with argument"),
        (["--plan", "pp=9"], 3, ""),
        (["--plan", "pp=2,dp=2"], 3, "dp of plan"),
    ],
)
def test_what_cannot_be(
    words: list[str],
    code: int,
    error: str,
    compared: list[Any],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", str(folder), *words]) == code
    assert error in capsys.readouterr().err
    assert not compared[1]


@pytest.mark.parametrize("option", ["--dequantize", "--quantize=int8"])
def test_forms_of_weights_that_are_not_compared_are_no_options(
    folder: Path, compared: list[Any], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Plain numbers are compared whatever is served: who gave `--quantize` was told "equal" of what it had not seen."""
    assert main(["verify", str(folder), option]) == 2
    assert "tllm verify has no option" in capsys.readouterr().err and not compared[1]
