"""A server as a process of its own: the first signal drains, the second stops at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

MAIN = """
import asyncio, sys
sys.path[:0] = {paths!r}
from tests.unit.server.kit import say, TOKENIZER
from tllm.server.app import build_app
from tllm.server.run import serve_http
from tllm.server.http.settings import ServerSettings
engine = say()
engine.hold_after = 1
engine.delay = 0.01
app = build_app(engine, TOKENIZER, None, ServerSettings(port=0, drain_seconds=20))
async def main():
    await serve_http(app, on_ready=lambda url: print(url, flush=True))
    print("cancelled", len(engine.cancelled), "torch" in sys.modules, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_signals(number: int) -> None:
    script = MAIN.format(paths=[os.getcwd(), *sys.path])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            body = {"prompt": "x", "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                lines = stream.iter_lines()
                assert "hello" in next(lines)
                process.send_signal(number)
                deadline = time.monotonic() + 15
                while httpx.get(f"{url}/health/ready").status_code != 503:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                assert process.poll() is None
                process.send_signal(number)
                assert process.wait(60) == 0
            assert process.stdout.readline().strip() == "cancelled 1 False"
        finally:
            process.kill()


def test_an_idle_server_stops_on_the_first_signal() -> None:
    script = MAIN.format(paths=[os.getcwd(), *sys.path])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert httpx.get(f"{url}/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
