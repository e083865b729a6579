"""The pages of benchmarks on devices, whose figures came from a machine that was lent, say what these figures say."""

from __future__ import annotations

import pytest

from benchmarks.devices import serving_report, training_report
from benchmarks.report.results import BENCHMARKS, Page, raw_of, wrapped

RESULTS = BENCHMARKS / "devices" / "results"
TRAINED, SERVED = raw_of(RESULTS / "training.md"), raw_of(RESULTS / "serving.md")


@pytest.mark.parametrize(
    "page",
    [training_report.page(TRAINED), serving_report.page(SERVED, "NVIDIA H200", "")],
    ids=lambda page: page.kind,
)
def test_a_page_is_made_of_its_figures(page: Page) -> None:
    text = (RESULTS / f"{page.kind}.md").read_text()
    assert page.table.strip() in text and wrapped(page.meaning) in text
    assert page.limits.split()[:60] == text.partition("falls short")[2].split()[:60]


def test_how_many_steps_were_timed_is_what_the_runs_were_given() -> None:
    given = [run | {"given": run["given"] | {"steps": "9"}} for run in TRAINED]
    assert "of each run 9 steps are timed" in " ".join(training_report.page(given).limits.split())
