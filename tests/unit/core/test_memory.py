"""What a process is said to have held is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tllm.core.memory import peak_bytes, rss_bytes

HELD = 256 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems say no more than `ru_maxrss`")
def test_a_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    held = b"x" * HELD
    assert rss_bytes() > len(held)
    assert peak_bytes() > len(held)
    program = "from tllm.core.memory import peak_bytes; print(peak_bytes())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert 0 < int(said.stdout) < HELD / 2
