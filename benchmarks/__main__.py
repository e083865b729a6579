"""`make bench`: every benchmark in turn; each writes its own page under benchmarks/results.

`python -m benchmarks NAME [its words]` runs one of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = (
    ["collectives"],
    ["serving", "0.3b", "--float32"],
    ["serving", "1.1b"],
    ["start"],
    ["training"],
    ["slow_links"],
    ["fuzz"],
    ["faults"],
    ["published"],
    ["wire_cost"],
    ["lost_ranks"],
    ["planning"],
    ["memory"],
    ["drafts"],
)


def main() -> None:
    for name, *words in [sys.argv[1:]] if sys.argv[1:] else RUNS:
        print("==", name, *words, flush=True)
        subprocess.run([sys.executable, str(HERE / f"{name}.py"), *words], check=True)


if __name__ == "__main__":
    main()
