"""Functions of the user's own, from files that a job names: loaded once, and called with a time by which they return.

This is the one place where code is loaded that is not part of the package: a file of the user's own, which the job
names, in the user's own command or on rank 0 alone, in a process that this command has started (`node.worker` sees to
that). Nothing of it ever comes from another machine.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm.core.errors import ConfigError
from tllm.training.job.rollout_keys import function_parts


@dataclass(frozen=True)
class UserFunction:
    """A function of a file, by its `name`."""

    name: str
    file: Path
    function: Callable[..., Any]


def load_function(text: str, key: str) -> UserFunction:
    """The function that `FILE.py:function` names under this key of the job.

    Its file is run, and can import what lies in its folder. ConfigError, in one line, where that fails.
    """
    file, name = function_parts(text)
    if not file.is_file():
        raise ConfigError(f"{key} names {name} of {file}, which is no file", "put the module beside the job's file")
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_spec = importlib.util.spec_from_file_location(file.stem, file)
    assert module_spec is not None and module_spec.loader is not None, "its name ends with .py"
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} raised {said(error)}", place_of(error, file) or file.name) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{file} has no function {name}", f"{key} names module:function")
    return UserFunction(name, file, function)


def called(call: Callable[[], Any], seconds: float, name: str) -> Future[Any] | None:
    """What a call came to, a value or what it raised; None if it has not returned in time. It is left behind then, in
    its thread."""
    result: Future[Any] = Future()

    def fail(kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            result.set_exception(error)
        return True

    def run() -> None:
        with ExitStack() as stack:
            stack.push(fail)
            result.set_result(call())

    thread = threading.Thread(target=run, name=f"tllm-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    return result if result.done() else None


def said(error: BaseException) -> str:
    """An error's kind and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a message'}"


def place_of(error: BaseException, file: Path) -> str:
    """The last line of this file that the error came through; "" where it came through none."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{file.name}, line {line}" if line else ""
