"""`make bench`: every benchmark in turn; each writes its own page under benchmarks/results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = (["collectives.py"], ["serving.py", "0.3b", "--float32"], ["serving.py", "1.1b"], ["start.py"])


def main() -> None:
    for words in RUNS:
        print("==", *words, flush=True)
        subprocess.run([sys.executable, str(HERE / words[0]), *words[1:]], check=True)


if __name__ == "__main__":
    main()
