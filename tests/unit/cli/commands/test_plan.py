from __future__ import annotations

import json
from pathlib import Path

import pytest

from tllm.cli.main import main
from tllm.spec.plan import Plan


def test_table_names_each_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--plan", "pp=2,tp=1+2,layers=2+4,shares=1:3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ") for line in lines if line.strip()[:1].isdigit()]
    assert len(rows) == 3
    text = "\n".join(lines)
    assert "[0, 2)" in text
    assert "[2, 6)" in text
    assert "3/4" in text


def test_grids_are_shown_beside_1d(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for plan in ("tp=4", "tp=4,tensor=2d", "pp=2,tp=1+4,tensor=2d"):
        assert main(["plan", str(folder), "--plan", plan]) == 0
        shown = capsys.readouterr().out
        assert "what each of 4 ranks of a stage sends for a batch that is served" in shown
        assert [line.split()[:2] for line in shown.splitlines()[-4:-2]] == [["1d", "4"], ["2d", "2x2"]]
        assert "tensor=2d sends the fewest bytes; " in shown, "sums this short go to every other rank"
    for plan in ("tp=2", "pp=2", "tp=4,shares=1:1:1:2"):
        assert main(["plan", str(folder), "--plan", plan]) == 0
        assert "what each of" not in capsys.readouterr().out


def test_json_is_a_plan_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = "pp=2,tp=1+2,layers=2+4,shares=1:3"
    assert main(["plan", str(folder), "--plan", short, "--json"]) == 0
    file = folder / "plan.json"
    file.write_text(capsys.readouterr().out)
    assert Plan.load(file, 6) == Plan.parse(short, 6)
    assert main(["plan", str(folder), "--plan", str(file)]) == 0


def test_json_accounts_for_every_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(folder), "--json"])
    whole = json.loads(capsys.readouterr().out)
    main(["plan", str(folder), "--plan", "tp=2", "--json"])
    halves = json.loads(capsys.readouterr().out)
    norms = (6 * 2 + 1) * 64 * 2  # held by both ranks: RMSNorm weights, two bytes each
    assert sum(rank["weight_bytes"] for rank in halves["ranks"]) == whole["ranks"][0]["weight_bytes"] + norms
    assert halves["ranks"][0]["kv_bytes_per_token"] * 2 == whole["ranks"][0]["kv_bytes_per_token"]


def test_dtype_doubles_the_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for dtype in ("bfloat16", "float32"):
        main(["plan", str(folder), "--dtype", dtype, "--json"])
        sizes.append(json.loads(capsys.readouterr().out)["ranks"][0]["weight_bytes"])
    assert sizes[1] == 2 * sizes[0]


def test_quantised_weights_are_counted_in_their_bits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*more: str) -> tuple[int, str | None]:
        main(["plan", str(folder), "--json", *more])
        found = json.loads(capsys.readouterr().out)
        return found["ranks"][0]["weight_bytes"], found["quantization"]

    linears, head = 6 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96), 320 * 64
    (plain, none), (int8, _), (int4, how) = (
        planned(*more) for more in ([], ["--quantize", "int8"], ["--quantize", "int4"])
    )
    assert (none, how) == (None, "int4")
    assert plain - int8 == (linears + head) * (16 - 8.5) / 8
    assert plain - int4 == linears * (16 - 4.5) / 8 + head * (16 - 8.5) / 8
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": awq}))
    assert planned("--dequantize") == (plain, None)
    assert planned() == (plain - linears * (16 - 6) / 8, "awq")
    assert main(["plan", str(folder)]) == 0
    assert "(awq: 6 bits a weight of the layers)" in capsys.readouterr().out
    assert main(["plan", str(folder), "--quantize", "int8"]) == 2
    assert "few bits already (awq)" in capsys.readouterr().err


def test_cache_memory_bounds_the_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(folder), "--kv-cache-memory", "100K", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert got["cache_tokens"] == (100 << 10) // (got["ranks"][0]["kv_bytes_per_token"] * 16) * 16


def test_a_cache_in_one_byte_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For as many bytes there are more tokens, and the table says what they are held in."""
    room = ["--kv-cache-memory", "100K", "--max-model-len", "64"]
    sizes = {}
    for kind in ("auto", "int8", "fp8", "fp8_e4m3"):
        assert main(["plan", str(folder), *room, "--kv-cache-dtype", kind, "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["kv_cache_dtype"] == kind
        sizes[kind] = (got["ranks"][0]["kv_bytes_per_token"], got["cache_tokens"])
    assert sizes["int8"] == sizes["fp8"] == sizes["fp8_e4m3"]
    numbers = sizes["auto"][0] // 2
    assert numbers < sizes["int8"][0] < 2 * numbers and sizes["int8"][1] > sizes["auto"][1]
    assert main(["plan", str(folder), "--kv-cache-dtype", "int8"]) == 0
    assert "(int8, with a scale of 4 bytes for each head's key and value)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--plan", "pp=7"], 3),
        (["--kv-cache-dtype", "int4"], 2),
        (["--plan", "tp=9"], 3),
        (["--plan", "pp=2,layers=3+4"], 3),
        (["--kv-cache-memory", "1K"], 3),
        (["--max-model-len", "129"], 2),
        (["--dtype", "int3"], 2),
        (["--plan", "missing.json"], 2),
    ],
)
def test_what_cannot_be(folder: Path, more: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *more]) == code
    assert "error: " in capsys.readouterr().err


def test_a_bad_sampling_file_is_no_matter_of_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "warm"}')
    assert main(["plan", str(folder)]) == 0
    assert main(["generate", str(folder), "--prompt-ids", "1"]) == 2, "who samples is told"
    assert "generation_config.json: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--svg", "picture.svg"], "--goal is left out"),
        (["--explain"], "--goal is left out"),
        (["--keep", "kept"], "--goal is left out"),
        (["--set", "seq_len=8"], "--set seq_len=8 changes a key of a job"),
        (["--goal", "serve", "--cluster", "c.toml", "--live"], "not allowed with argument --cluster"),
        (["--goal", "serve", "--cluster", "c.toml", "--nodes", "2"], "not allowed with argument --cluster"),
        (["--goal", "serve", "--cluster", "c.toml", "--svg", "no-such-folder/a.svg"], "a folder that is not there"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "\nhint: " in shown.err and not shown.out
