"""The first lines of the `tllm` command: Ctrl-C ends it without a traceback while Python still loads the rest, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Load `tllm.cli.main` and run it; returns the exit code."""
    try:
        from tllm.cli.main import main as loaded

        return loaded()
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        return 130  # `INTERRUPTED` of what is not loaded yet
