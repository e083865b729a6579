"""For every test: a hang prints each process's stacks and ends; a child process left behind fails the test."""

from __future__ import annotations

import faulthandler
import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.cluster.processes import (
    adopt_orphans,
    bury,
    command,
    descendants,
    ended_orphans,
    kill,
    print_stacks,
    wait_until_gone,
)
from tests.support.commands.forked_command import ForkedServer, environment_at_start
from tests.support.process_state import as_in_a_process_of_its_own, left_changed, process_state
from tests.support.processor_rate import SLOW, slowness
from tests.support.properties import register_profiles
from tllm.core.stacks import STACKS_VARIABLE

# Several ranks on few cores: more threads are only slower. Here, since torch reads it once, and a folder's conftest.py
# that imports it is read before any hook is called.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SECONDS_TO_END = 20
"""How long after its limit a test may still hold the main thread (in C code, say) before the whole run is ended."""

STACKS = Path(tempfile.mkdtemp(prefix="tllm-stacks-")) / "stacks.txt"
"""Where child processes put their stacks."""

FAILURES_VARIABLE = "TLLM_TEST_FAILURES"
"""The file that gets a line for each failure: a log of continuous integration may be cut anywhere but at its end."""

_backstops: dict[str, threading.Timer] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything", action="store_true", help="on a slow processor, too, run tests that are marked slow"
    )


def pytest_configure(config: pytest.Config) -> None:
    register_profiles()
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the real hub; those with a hub of their own say so
    os.environ[STACKS_VARIABLE] = str(STACKS)  # a worker's stderr is read by its parent, which may be what hangs
    slowness()
    environment_at_start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    adopt_orphans()
    subprocess.Popen = ForkedServer  # type: ignore[misc]  # a cluster's workers are there at once


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The folders in the order in which they were named, whatever chance makes of the files in them: with long files
    last one core would end alone."""
    named = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    items.sort(key=lambda item: next((i for i, one in enumerate(named) if item.path.is_relative_to(one)), len(named)))
    if _is_without_slow(config):
        left = {item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("soak")}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def _is_without_slow(config: pytest.Config) -> bool:
    """Files that are named are run whole."""
    is_named = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return slowness() >= SLOW and not is_named and not config.getoption("everything")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _is_without_slow(config):
        terminalreporter.write_line(
            f"This processor takes {slowness():.1f} times as long as a usual one: tests that are marked slow were left "
            "out. PYTEST_ARGS=--everything runs them too."
        )


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # half a million objects of libraries, which each full collection would look at again: 3 % of the tests


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Random numbers of torch that a test does not seed are the same each time, not those that tests before it left. By
    the file, so that a wider fixture's are the same whichever test is the first to ask for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(zlib.crc32(item.nodeid.partition("::")[0].encode()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _note_failure(f"{report.nodeid} ({report.when}): {crash.message if crash else report.longrepr}")


def pytest_internalerror(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    _note_failure(f"pytest itself: {str(excinfo.value).strip().rpartition(chr(10))[2]}")


def pytest_unconfigure() -> None:
    shutil.rmtree(STACKS.parent, ignore_errors=True)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """In place of pytest-timeout's own timer: one that knows child processes too, and this processor's rate."""
    limit = settings.timeout * slowness()

    def ring(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _show_and_kill(f"{item.nodeid} has run for its limit of {limit:g} s")
        pytest.fail(f"Timeout (>{limit:g} s); the stacks of every process are in the captured stderr")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    backstop = threading.Timer(limit + SECONDS_TO_END, _end_run, [item])
    backstop.daemon = True
    backstop.start()
    _backstops[item.nodeid] = backstop
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    backstop = _backstops.pop(item.nodeid, None)
    if backstop is not None:
        backstop.cancel()
    return True


@pytest.fixture(autouse=True)
def no_change_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves this process other than it was. A test's other fixtures are set up after this one, as
    `monkeypatch` is asked for by one that asks for this, and have ended before it looks; wider ones are older."""
    before, path = process_state(), [*sys.path]
    yield
    sys.path[:] = path  # a file that a job names can import what lies beside it, for as long as its process lives
    if changes := left_changed(before):
        pytest.fail(f"{request.node.nodeid} left this process changed:\n  " + "\n  ".join(changes), pytrace=False)


@pytest.fixture
def own_process() -> Iterator[None]:
    """For tests that run commands, or files of a user, in this process; they may change it as one of their own."""
    with as_in_a_process_of_its_own():
        yield


@pytest.fixture(autouse=True)
def no_weights_kept_before(
    no_change_left: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that a test starts by the command find nothing on their shelf, and leave nothing in this user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache" / secrets.token_hex(8)))


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a child process that it started still lives; wider fixtures' processes are older."""
    before, orphans = set(descendants()), ended_orphans()
    yield
    bury(orphans & ended_orphans())  # not what has ended since: a fork of this very test may be waited for yet
    left = wait_until_gone([pid for pid in descendants() if pid not in before])
    if left:
        names = "\n".join(f"  {pid}: {command(pid)}" for pid in left)
        kill(left)
        pytest.fail(f"{request.node.nodeid} left {len(left)} child processes:\n{names}")


def _note_failure(text: str) -> None:
    """Once for all processes of the tests: those of pytest-xdist report to the first."""
    if (file := os.environ.get(FAILURES_VARIABLE)) and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a") as failures:
            failures.write(" ".join(text.split()) + "\n")


def _show_and_kill(title: str) -> None:
    print(f"\n=== {title}; stacks of this process:", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(file=2, all_threads=True)
    children = descendants()
    print_stacks(children, STACKS)
    kill(children)


def _end_run(item: pytest.Item) -> None:
    """What pytest has captured is lost with this process, and with it what is printed before that has ended."""
    item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    _show_and_kill(title := f"{item.nodeid} cannot be interrupted; the run ends here")
    _note_failure(title)
    os._exit(70)
