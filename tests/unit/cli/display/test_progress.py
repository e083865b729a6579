from __future__ import annotations

import signal

import pytest
from rich.progress import Progress

from tllm.cli.display import progress as module
from tllm.cli.display.run_display import RunDisplay
from tllm.cli.display.tables import span, table
from tllm.core.memory import amount
from tllm.node.coordinator.cluster_options import LINKS_MEASURED
from tllm.node.machine import suspension
from tllm.node.machine.suspension import suspend_in_order


def test_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    tell = module.Lines()
    for step in range(13):
        now = 100.0 + step
        tell("rank 0", step << 20, 12 << 20)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"rank 0: {done}.0 MiB of 12.0 MiB" for done in (5, 10, 12)]
    tell(LINKS_MEASURED, 0, 3)
    now += 9
    tell(LINKS_MEASURED, 1, 3)
    assert capsys.readouterr().err == "links measured: 1 of 3\n"


def test_bars_tell_bytes_from_what_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    with module._bars() as tell:
        tell(LINKS_MEASURED, 1, 3)
        tell("rank 0 on a", 1 << 20, 3 << 20)
    said = capsys.readouterr().err
    tell("rank 0 on a", 3 << 20, 3 << 20)
    assert capsys.readouterr().err == "", "what comes late shows nothing anew"
    assert "1 of 3" in said and "1.0 MiB of 3.0 MiB" in said


def test_an_interrupt_leaves_no_bars_and_no_hidden_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second Ctrl-C comes while the first one's bars are taken away."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stop = Progress.stop

    def interrupted(bars: Progress) -> None:
        signal.raise_signal(signal.SIGINT)
        stop(bars)

    monkeypatch.setattr(Progress, "stop", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), module._bars() as tell:
        tell("rank 0 on a", 1 << 20, 3 << 20)
    said = capsys.readouterr().err
    assert said.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is shown, and the line of the bar is empty"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_z_gives_the_shell_its_cursor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever stopped a run typed in a shell without a cursor until the run went on."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = list[str]()
    monkeypatch.setattr(suspension.os, "kill", lambda process, number: said.append("".join(capsys.readouterr())))
    before = signal.getsignal(signal.SIGTSTP)
    suspend_in_order()
    with module._bars() as tell:
        press_ctrl_z()
        assert said.pop() == HERE and capsys.readouterr().err == HERE, "no bar is drawn yet"
        tell("rank 0 on a", 1 << 20, 3 << 20)
        press_ctrl_z()
        assert said.pop().endswith(HERE)
        assert capsys.readouterr().err.startswith(GONE)
    capsys.readouterr()
    press_ctrl_z()
    assert said.pop() == capsys.readouterr().err == "", "there is no bar any more"
    display = RunDisplay(3, False)
    display._bar = display._open_bar(1)
    press_ctrl_z()
    display._close_bar()
    press_ctrl_z()
    assert [told.endswith(HERE) for told in said] == [True, False], "a run's bar as well"
    signal.signal(signal.SIGTSTP, before)


def press_ctrl_z() -> None:
    handler = signal.getsignal(signal.SIGTSTP)
    assert callable(handler), "else these tests would stop here"
    handler(signal.SIGTSTP, None)


HERE, GONE = "\x1b[?25h", "\x1b[?25l"
"""What shows a terminal's cursor and hides it."""


def test_what_is_quick_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    tell = module.Lines()
    tell("rank 0", 0, 100)
    tell("rank 0", 100, 100)
    assert capsys.readouterr().err == ""


def test_no_terminal_no_bars() -> None:
    with module.progress() as tell:
        assert isinstance(tell, module.Lines)


def test_a_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["rank", "layers", "memory"], ["0", "[0, 3)", "1.5 MiB"]]
    assert table(rows) == "rank  layers   memory\n   0  [0, 3)  1.5 MiB"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    assert table(rows) == "rank  layers\n   0  [0, 3)\n\nrank   memory\n   0  1.5 MiB"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 29, "1.50 GiB"),
        (5 << 40, "5120.00 GiB"),
    ],
)
def test_amounts(count: int, text: str) -> None:
    assert amount(count) == text


def test_numbers_line_up_at_the_right() -> None:
    assert table([["name", "size"], ["a", "1 B"], ["bcdef", "10 B"]]) == "name   size\na       1 B\nbcdef  10 B"
    assert span(2, 5) == "[2, 5)"
