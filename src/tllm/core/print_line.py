"""`print_line`: what a long-running command tells its operator on stdout, which may be a file on a full disk."""

from __future__ import annotations

import logging

log = logging.getLogger("tllm")


def print_line(words: str) -> None:
    """Print at once. Where that fails the command goes on, and the log says what failed; the words are left out of it,
    as they may have a token."""
    try:
        print(words, flush=True)
    except OSError as error:
        log.warning("a line for the operator could not be printed: %s", error.strerror)
