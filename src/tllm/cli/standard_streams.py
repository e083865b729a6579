"""Makes stdin, stdout and stderr fit to be used, as whoever starts a command may have left them."""

from __future__ import annotations

import io
import os
import sys

STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def ready_streams() -> None:
    """Open those that are closed (`>&-`) to nothing: Python has None in their place, and the next file or connection
    would get their number, to which C libraries write. What the encoding of stdout lacks, such as an ellipsis in
    Latin-1, is written as an escape, as stderr has it, and ends no command."""
    for name, mode in STANDARD:
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
