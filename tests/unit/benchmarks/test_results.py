"""The writer of benchmark results, and the committed pages, which have the form that it writes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.report import results
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, Provenance

PAGES = sorted(results.BENCHMARKS.glob("*/results/*.md"))
OVERVIEW = [line for line in (results.BENCHMARKS / "README.md").read_text().splitlines() if "/results/" in line]
NUMBER = re.compile(r"(?<![\w.-])(\d+(?:,\d{3})*(?:\.\d+)?)(?!\.?\d)")
DERIVED = {
    "serving-0.3b": {"0.57", "1.48"},  # of single rounds, which the JSON has
    "training": {"1.25"},
    "held-out": {"160"},
    "mixed-load": {"2.3", "1.8"},
    "mixed-load-beside": {"0.65"},
}
"""Figures of the overview that follow from those of a page, by the name of the page in the overview."""

MADE = Provenance("2026-11-24", "abc1234", "Some CPU, 2 cores, 24 GiB, Linux 6.1", "python -m benchmarks.comm.links")
PAGE = Page("comm", "links", "Links", "Why it\nis measured.", "| a |\n|---|\n| 1 |", "- one\n- two", "Not much.")


def test_a_page_names_where_its_figures_come_from_and_lies_beside_its_json(tmp_path: Path) -> None:
    raw = {"runs": [{"seconds": 0.1 + 0.2, "losses": [1.5] * 100}], "seed": 0, 64: "an int key"}
    path = results.write(PAGE, raw, MADE, tmp_path)
    assert path == tmp_path / "comm" / "results" / "links.md"
    assert path.read_text() == (
        "# Links\n\nWhy it is measured.\n\n"
        "- Processor: Some CPU, 2 cores, 24 GiB, Linux 6.1\n"
        "- Date and commit: 2026-11-24, abc1234\n"
        "- Command: `python -m benchmarks.comm.links`\n"
        "- Raw figures: [links.json](links.json)\n\n"
        "| a |\n|---|\n| 1 |\n\n"
        "## What it means\n\n- one\n- two\n\n"
        "## Where it falls short\n\nNot much.\n"
    )
    assert results.raw_of(path) == results.raw_of(path.with_suffix(".json")) == json.loads(json.dumps(raw))


def test_a_new_run_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    results.write(PAGE, {"run": 1}, MADE, tmp_path)
    path = results.write(PAGE, {"run": 2}, MADE, tmp_path)
    assert results.raw_of(path) == {"run": 2}
    assert sorted(p.name for p in path.parent.iterdir()) == ["links.json", "links.md"]


def test_a_page_that_is_too_long_is_written_and_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join("| 1 |" for _ in range(results.PAGE_LINES))
    page = Page("comm", "links", "Links", "Why.", f"| a |\n|---|\n{rows}", "This.", "That.")
    assert results.write(page, {}, MADE, tmp_path).exists()
    assert "shorten its table" in capsys.readouterr().err


def test_json_keeps_every_number_and_breaks_what_is_long() -> None:
    value = {"short": [1, 2.5, None], "long": [i / 7 for i in range(50)], "rows": [{"a": "x" * 90, "b": [[1], {}]}] * 2}
    text = results.as_json(value)
    assert json.loads(text) == value
    assert max(map(len, text.splitlines())) <= results.JSON_WIDTH + 2
    assert '"short": [1, 2.5, null]' in text
    assert results.as_json({"a": 1}) == '{"a": 1}'


def test_prose_is_wrapped_but_lists_and_code_stay_whole() -> None:
    text = results.wrapped("one\ntwo\n\n- " + "word " * 40 + "\n- `python -m " + "x" * 95 + " y` 5 %\n")
    first, items = text.split("\n\n")
    assert first == "one two"
    assert max(map(len, items.splitlines())) <= results.TEXT_WIDTH
    assert [line[:2] for line in items.splitlines()] == ["- ", "  ", "- "]
    assert items.endswith("y` 5 %")


def test_a_table_lines_numbers_up_at_the_right() -> None:
    assert table([["a", "b", "c"], ["x", "1", "y"]], comment=True) == "| a | b | c |\n|---|--:|---|\n| x | 1 | y |"
    assert table([["a", "b"], ["x", "y"]], left=2) == "| a | b |\n|---|---|\n| x | y |"
    assert (percent(0.1234), percent(0.1, sign=True), percent(-0.1)) == ("12.3 %", "+10.0 %", "-10.0 %")


def test_the_command_says_the_module_and_no_place_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    program = str(results.BENCHMARKS / "comm" / "links.py")
    monkeypatch.setattr(sys, "argv", [program, "--turns", "1", "/tmp/somewhere/text.txt", "../data/other.txt", "0.3b"])
    assert results.command() == "python -m benchmarks.comm.links --turns 1 text.txt other.txt 0.3b"


def test_the_processor_is_that_of_this_machine() -> None:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    assert not models or models[0].split(":")[1].strip() in results.processor()
    assert re.search(r", \d+ cores, \d+ GiB, Linux \d", results.processor())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_committed_pages_are_short_and_have_their_raw_figures(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= results.PAGE_LINES
    for part in ("# ", "- Processor: ", "- Date and commit: 20", "- Command: `python ", "| ", "## What it means"):
        assert any(line.startswith(part) for line in text.splitlines()), part
    assert f"[{path.stem}.json]({path.stem}.json)" in text and "```" not in text
    assert results.raw_of(path)


def figures(text: str) -> list[str]:
    return [number.replace(",", "") for number in NUMBER.findall(text)]


@pytest.mark.parametrize("line", OVERVIEW, ids=lambda line: line.split("| [")[1].partition("]")[0])
def test_the_overview_says_what_its_pages_have(line: str) -> None:
    """A figure as it stands there, or rounded, or without its minus."""
    links = re.findall(r"\[([^]]+)\]\(([^)]+\.md)\)", line)
    pages = ((results.BENCHMARKS / path).read_text().replace("-", " ") for _, path in links)
    held = {float(one) for page in pages for one in figures(page)}
    said = set(figures(line.split("|")[2])) - {one for name, _ in links for one in DERIVED.get(name, ())}
    missing = [one for one in said if float(one) not in {round(x, len(one.partition(".")[2])) for x in held}]
    assert not missing, f"{missing} of the overview stand in no page of {[path for _, path in links]}"
