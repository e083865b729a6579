"""Lines of JSON that runs on a device append to a file, and what the reports that read them are told."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any


def append(out: Path | None, found: dict[str, Any]) -> None:
    """A line of JSON more in the file, if one was given."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")


def report_parser(words: str | None) -> argparse.ArgumentParser:
    """Of a report: the file, and of which day and commit its runs are."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="lines of JSON that the runs appended")
    parser.add_argument("--commit", required=True, help="that ran")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="of the runs")
    return parser


def read_figures(file: Path) -> list[dict[str, Any]]:
    """All lines of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]
