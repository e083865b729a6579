"""What every benchmark writes: one short page for people, and its raw figures as JSON beside it.

Both lie in `benchmarks/<subject>/results/`, as `<kind>.md` and `<kind>.json`. A new run takes the place of the one
before it, which stays in the history of git.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]

PAGE_LINES = 90
"""A page may be as long as this; whoever wants more reads the JSON."""

TEXT_WIDTH = 118
"""Columns of a page's prose; tables may be wider."""

KEPT_SPACE = "\0"
"""Stands for a space at which a line is not broken."""

JSON_WIDTH = 200
"""Columns that a JSON value may take before it is broken into several lines: enough for most records."""


@dataclass(frozen=True)
class Provenance:
    """Where figures come from."""

    date: str
    commit: str
    processor: str
    command: str

    @classmethod
    def of_this_run(cls) -> Provenance:
        return cls(datetime.date.today().isoformat(), commit(), processor(), command())


@dataclass(frozen=True)
class Page:
    """What a benchmark says of a run. `limits` says what was not measured, and where we are behind others."""

    subject: str
    kind: str
    title: str
    purpose: str
    table: str
    meaning: str
    limits: str

    def text(self, made: Provenance) -> str:
        return (
            f"# {self.title}\n\n{wrapped(self.purpose)}\n\n"
            f"- Processor: {made.processor}\n"
            f"- Date and commit: {made.date}, {made.commit}\n"
            f"- Command: `{made.command}`\n"
            f"- Raw figures: [{self.kind}.json]({self.kind}.json)\n\n"
            f"{self.table.strip()}\n\n"
            f"## What it means\n\n{wrapped(self.meaning)}\n\n"
            f"## Where it falls short\n\n{wrapped(self.limits)}\n"
        )


def write(page: Page, raw: Any, made: Provenance | None = None, root: Path = BENCHMARKS) -> Path:
    """Write the page and its JSON under `root`, print the page, and return its path."""
    folder = root / page.subject / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / f"{page.kind}.md", page.text(made or Provenance.of_this_run())
    path.with_suffix(".json").write_text(as_json(raw) + "\n")
    path.write_text(text)
    print(text)
    if (lines := len(text.splitlines())) > PAGE_LINES:
        print(f"{path.name} has {lines} lines, more than {PAGE_LINES}: shorten its table", file=sys.stderr)
    return path


def raw_of(path: Path) -> Any:
    """The raw figures of a page that `write` made; `path` is the page or its JSON."""
    return json.loads(path.with_suffix(".json").read_text())


def processor() -> str:
    """The processor as /proc/cpuinfo names it, with cores, memory and the kernel's version."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release().split('-')[0]}"


@cache
def commit() -> str:
    """The commit that runs. It is asked for once, so that a commit made meanwhile does not change it."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=BENCHMARKS, check=False)
    return done.stdout.strip() or "unknown"


def command() -> str:
    """How this process was started. Paths outside the working folder are shortened to their last part."""
    program = Path(sys.argv[0]).resolve()
    inside = program.is_relative_to(BENCHMARKS)
    name = ".".join(program.relative_to(BENCHMARKS.parent).with_suffix("").parts) if inside else program.name
    words = (Path(word).name if Path(word).is_absolute() or word.startswith("..") else word for word in sys.argv[1:])
    return " ".join(("python -m", name, *words))


def wrapped(text: str) -> str:
    """Break paragraphs and `- ` items at `TEXT_WIDTH` columns, but neither in code nor before a percent sign."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = list[str]()
        for item in re.split(r"\n(?=- )", paragraph):
            indent = "  " if item.startswith("- ") else ""
            flat = re.sub(r"`[^`]*`| %", lambda kept: kept[0].replace(" ", KEPT_SPACE), " ".join(item.split()))
            lines += textwrap.wrap(
                flat, TEXT_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        paragraphs.append("\n".join(lines).replace(KEPT_SPACE, " "))
    return "\n\n".join(paragraphs)


def as_json(value: Any) -> str:
    """Indented JSON. What fits on a line stays on it, so that a long run of numbers is no long column."""
    return _lines(json.loads(json.dumps(value)), 0)


def _lines(value: Any, depth: int) -> str:
    flat = json.dumps(value)
    if len(flat) + depth <= JSON_WIDTH or not isinstance(value, dict | list):
        return flat
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_lines(one, depth + 1)}" for key, one in value.items()]
        return "{" + inner + f",{inner}".join(entries) + outer + "}"
    if any(isinstance(one, dict | list) for one in value):
        return "[" + inner + f",{inner}".join(_lines(one, depth + 1) for one in value) + outer + "]"
    rows = [""]
    for one in map(json.dumps, value):
        if rows[-1] and len(rows[-1]) + len(one) + depth + 3 > JSON_WIDTH:
            rows.append(one)
        else:
            rows[-1] += f", {one}" if rows[-1] else one
    return "[" + inner + f",{inner}".join(rows) + outer + "]"
