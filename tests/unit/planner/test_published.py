"""Published results: what is predicted, what was fitted, and that each row further off is explained in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.planner import published
from tests.support.selection import EACH_PART, REST

ROWS: list[dict[str, Any]] = published.read("rows")["row"]
NAMED = {
    "bridge-8b": 14451,
    "bridge-70b": 1602,
    "titan-8b-eager": 5762,
    "titan-405b-1f1b": 100,
    "titan-405b-interleaved": 128,
    "dllama-pi4-7b-1": 1312.5,
    "dllama-pi4-7b-2": 793.69,
    "dllama-pi4-7b-4": 494.0,
    "tllm-8b-alone": 19.31,
    "tllm-8b-thunderbolt": 13.26,
}


def test_rows_have_a_source_and_say_how_they_were_used() -> None:
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["source"] and row["use"] in ("fit", "held"), row["id"]
    fitted = {row["id"] for row in ROWS if row["use"] == "fit"}
    named = [one for kind in published.read("machines").values() for one in kind["fit"].split(", ") if one]
    assert set(named) == fitted and len(named) == len(fitted)
    assert len(fitted) < len(ROWS) / 4


def test_each_kind_of_machine_has_one_curve() -> None:
    """No factor is given for a row: a row names a plan, a job, how its trainer works, and perhaps a link."""
    known = {"id", "what", "source", "use", "why", "stack", "model", "machines", "link", "published"}
    of_job = {"plan", "batch", "microbatch", "seq", "products", "dtype"}
    of_service = {"plan", "prompt", "reply", "dtype", "weight_bits", "message_bits"}
    for row in ROWS:
        assert set(row) <= known | {"train", "serve", "execution"}, row["id"]
        assert set(row.get("execution", {})) <= {"again"}, row["id"]
        assert set(row.get("train", {})) <= of_job and set(row.get("serve", {})) <= of_service, row["id"]


@EACH_PART
def test_every_row_is_close_or_explained(part: str) -> None:
    taken = ROWS if part == REST else [row for place, row in enumerate(ROWS) if place % 3 == 0 or row["id"] in NAMED]
    rows = [published.predicted(row) for row in taken]
    far = {row["id"] for row in rows if abs(row["error"]) > published.CLOSE}
    assert far == {row["id"] for row in taken if "why" in row}
    assert not far & {row["id"] for row in taken if row["use"] == "fit"}
    close = {row["id"]: row["value"] for row in rows if row["id"] in NAMED}
    assert close == NAMED and not far & set(NAMED)
    text = published.as_table(rows)
    assert "NOT EXPLAINED" not in text and text.count("\n| ") == len(rows)


def test_the_committed_table_is_what_the_model_says() -> None:
    """Some rows, quick ones: the page is made anew when the model changes."""
    path = published.HERE / "results" / "published.json"
    held = {row["id"]: row for row in json.loads(path.read_text())}
    assert set(held) == {row["id"] for row in ROWS}
    for row in ROWS:
        if "serve" in row or row["id"] in ("bridge-8b", "titan-8b-float8", "titan-70b-tp"):
            assert published.predicted(row)["predicted"] == pytest.approx(held[row["id"]]["predicted"], rel=1e-6)


def test_a_slower_row_is_an_error_below_nothing() -> None:
    """In seconds or in tokens, too slow a prediction is negative."""
    row = next(one for one in ROWS if one["id"] == "dllama-pi4-7b-1")
    assert published.predicted(row | {"published": {"milliseconds": 1.0}})["error"] < -0.99
    assert published.predicted(row | {"published": {"tokens_per_second": 1e9}})["error"] < -0.99
