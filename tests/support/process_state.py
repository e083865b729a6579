"""What a test may leave changed in its process: a test after it there would meet that, and pass or fail by their order.

That is the process's settings (environment, loggers, torch, signals, ...), and open files: one that only a cycle of
references keeps is closed by whichever test runs when Python collects next, which then fails by the other's
ResourceWarning. So cycles are collected where a test has left files open.

Not here: filters of warnings, which pytest itself sets back after each phase of a test, and random numbers, whose state
each test gets anew; threads, and what they hold, which wider fixtures may start at any time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "GLOO_SOCKET_IFNAME"}
"""Variables that pytest sets for each test, torch when its compiler is first imported, links over gloo, which have no
other way to choose an interface."""

THREADS = "torch's number of threads"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2)
"""Those that somebody here handles; without SIGALRM, which is each test's own limit."""

LIMITS = (("sizes of files", resource.RLIMIT_FSIZE), ("data", resource.RLIMIT_DATA))
"""Without that of open files, which a server raises once where it is low."""

TURNED_DOWN = ("asyncio", "uvicorn", "opentelemetry")
"""Loggers of libraries whose levels the program sets."""

NEW_LOGGER = (logging.NOTSET, (), True, False)


@dataclass(frozen=True)
class ProcessState:
    settings: Mapping[str, object]
    environment: Mapping[str, str]
    loggers: Mapping[str, tuple[object, ...]]
    """Level, handlers, whether its records go to its parent's handlers, whether it is disabled."""

    files: frozenset[tuple[int, str]]
    """Number and name of those that are open."""


def process_state() -> ProcessState:
    """What is compared before and after a test; takes 0.12 ms of a processor (Intel Xeon)."""
    return ProcessState(
        settings=_python() | _torch(),
        environment={name: value for name, value in os.environ.items() if name not in OF_OTHERS},
        loggers=_loggers(),
        files=open_files(),
    )


def left_changed(before: ProcessState) -> list[str]:
    """A line for each setting that is another now."""
    now = process_state()
    if now.files - before.files:
        gc.collect()
    known = {name: now.settings[name] for name in before.settings}  # without those of torch, if the test imported it
    return [
        *_differences("{}", before.settings, known),
        *_differences("os.environ[{!r}]", before.environment, now.environment),
        *_differences("the logger {!r}", before.loggers, now.loggers, missing=NEW_LOGGER),
    ]


@contextmanager
def as_in_a_process_of_its_own() -> Iterator[None]:
    """Sets back what a command changes in its process, which elsewhere ends with it."""
    before, handlers = process_state(), {number: signal.getsignal(number) for number in SIGNALS}
    excepthook = sys.excepthook
    yield
    sys.excepthook = excepthook
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:  # not that of SIGUSR1, which Python does not know of
            signal.signal(number, handler)
    for name in os.environ.keys() - before.environment.keys() - OF_OTHERS:
        del os.environ[name]
    os.environ.update(before.environment)
    for name in TURNED_DOWN:
        logging.getLogger(name).setLevel(before.loggers.get(name, NEW_LOGGER)[0])
    if threads := before.settings.get(THREADS):
        sys.modules["torch"].set_num_threads(threads)


def _python() -> dict[str, object]:
    signals = {f"the handler of {number.name}": signal.getsignal(number) for number in SIGNALS}
    limits = {f"the limit of {name}": resource.getrlimit(limit) for name, limit in LIMITS}
    others = {
        "the working folder": os.getcwd(),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "the switch interval of threads": sys.getswitchinterval(),
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "whether cycles are collected": gc.isenabled(),
        "logging.disable": logging.root.manager.disable,
    }
    if sys.platform == "linux":
        others["the processors of this process"] = os.sched_getaffinity(0)
    return signals | limits | others


def _torch() -> dict[str, object]:
    """Nothing, as long as nobody has imported it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):
        return {}
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        THREADS: torch.get_num_threads(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's precision of float32 products": torch.get_float32_matmul_precision(),
    }


def _loggers() -> dict[str, tuple[object, ...]]:
    """Ours, the root and some of libraries: others are set when these are first imported."""
    known = {"root": logging.root} | logging.root.manager.loggerDict
    return {
        name: (one.level, tuple(one.handlers), one.propagate, one.disabled)
        for name, one in known.items()
        if isinstance(one, logging.Logger) and (name.startswith("tllm") or name in ("root", *TURNED_DOWN))
    }


def open_files() -> frozenset[tuple[int, str]]:
    """Number and name of each that this process has open."""
    found = set()
    with contextlib.suppress(FileNotFoundError):  # there is no such folder on other systems
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # as the one is that lists them
                found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


def _differences(
    title: str, before: Mapping[str, object], now: Mapping[str, object], missing: object = None
) -> list[str]:
    if before == now:
        return []
    return [
        f"{title.format(name)} was {was!r}, is {is_now!r}"
        for name in before.keys() | now.keys()
        if (was := before.get(name, missing)) != (is_now := now.get(name, missing))
    ]
