"""What every benchmark writes: a table to read and the raw figures, with date, commit, hardware and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """The processor and how many cores and how much memory this machine has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores {model}, {memory:.0f} GiB, {platform.system()} {platform.release().split('-')[0]}"


@cache
def commit() -> str:
    """Of what runs: the same to the end, whatever is committed meanwhile."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    return done.stdout.strip() or "unknown"


def command() -> str:
    """What this process was started with, without the places of this machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return " ".join(("python", f"benchmarks/{Path(sys.argv[0]).name}", *words))


def raw_of(page: Path) -> dict[str, Any]:
    """The raw figures of a page that `write` made."""
    raw: dict[str, Any] = json.loads(page.read_text().split("```json\n")[-1].split("\n```")[0])
    return raw


def write(theme: str, what: str, table: str, raw: dict[str, Any], notes: str = "") -> Path:
    """Write `results/<theme>_<cores>cpu_<date>.md` and return its path; also print it."""
    today = datetime.date.today().isoformat()
    path = RESULTS / f"{theme}_{os.cpu_count()}cpu_{today}.md"
    text = f"# {what}\n\n- date: {today}\n- commit: {commit()}\n- hardware: {hardware()}\n- command: `{command()}`\n\n"
    text += f"{table}\n\n{notes}\n\n## Raw\n\n```json\n{json.dumps(raw, indent=1)}\n```\n"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(text)
    print(text.split("## Raw")[0])
    return path
