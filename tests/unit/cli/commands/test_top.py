"""`tllm top` against a server over a fake engine, and on a real terminal (a pseudo-terminal)."""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from tests.unit.server.kit import say, serve
from tllm.cli.main import main
from tllm.server.run import bind

OTHER_SCREEN_LEFT, CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture
def port() -> Iterator[str]:
    """Of a server that has taken one sample."""
    app = serve(say(), api_keys=("a-long-key",))
    engine = app.router.client
    engine.status = lambda: {"model": "m", "plan": "pp=1", "ready": True, "nodes": []}  # type: ignore[method-assign]
    app.recorder.sample()
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield str(listening.getsockname()[1])
    server.should_exit = True
    thread.join()
    listening.close()


def test_once(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--port", port, "--api-key", "a-long-key"]) == 0
    assert capsys.readouterr().out.startswith("m: ready, plan pp=1\n0 sequences run, 0 wait;")


def test_a_wrong_key_and_no_server(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--port", port, "--api-key", "another-key"]) == 5
    assert "does not take the API key" in capsys.readouterr().err
    assert main(["top", "--port", "9"]) == 4
    assert "no server at 127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [b"q", b"xQ"])
def test_q_ends_it_also_behind_another_key(port: str, typed: bytes) -> None:
    """Of keys that came together the first was looked at, and the others again when one more had come."""
    child, terminal = on_a_terminal(port)
    until(b"m: ready, plan pp=1", terminal)
    os.write(terminal, typed)
    _drain(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(port: str) -> None:
    """The shell was left on the other screen, without a cursor and without what is typed."""
    child, terminal = on_a_terminal(port)
    before = termios.tcgetattr(terminal)
    until(b"m: ready, plan pp=1", terminal)
    assert termios.tcgetattr(terminal) != before
    os.write(terminal, b"\x1a")
    assert CURSOR in until(OTHER_SCREEN_LEFT, terminal)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    assert termios.tcgetattr(terminal) == before
    os.kill(child, signal.SIGCONT)
    until(b"m: ready, plan pp=1", terminal)
    os.write(terminal, b"q")
    _drain(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_terminal_that_cannot_draw_gets_it_once(port: str) -> None:
    """It showed nothing, for ever."""
    child, terminal = on_a_terminal(port, "dumb")
    assert b"\x1b" not in until(b"0 sequences run, 0 wait;", terminal)
    _drain(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def on_a_terminal(port: str, kind: str = "xterm") -> tuple[int, int]:
    """The process of `tllm top`, and its terminal."""
    child, terminal = pty.fork()
    if child == 0:
        words = [sys.executable, "-m", "tllm.cli", "top", "--port", port]
        os.execvpe(words[0], words, {**os.environ, "TLLM_API_KEY": "a-long-key", "TERM": kind, "COLUMNS": "120"})
    return child, terminal


def until(shown: bytes, terminal: int) -> bytes:
    """What is shown until this is."""
    seen = b""
    while shown not in seen:
        seen += os.read(terminal, 4096)
    return seen


def _drain(terminal: int) -> None:
    """Read until the other end is closed, which Linux tells by an error."""
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        return
