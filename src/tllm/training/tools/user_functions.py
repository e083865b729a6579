"""Functions of the user's own, from files that a job names: loaded once, and called with a deadline.

This is the one place where code is loaded that is not part of the package: a file of the user's own, which the job
names, in the user's own command or on rank 0 alone, in a process that this command has started (`node.worker` sees to
that). Nothing of it ever comes from another machine.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tllm.core.errors import ConfigError
from tllm.core.timing import Deadline
from tllm.training.job.rollout_keys import RolloutConfig, function_parts, is_url


@dataclass(frozen=True)
class UserFunction:
    """A function of a file, by its `name`."""

    name: str
    file: Path
    function: Callable[..., Any]


class UserModules:
    """The files that a job names, each run once: what its functions and classes share, all of them see.

    Whoever calls them holds `turn`, so that none of them runs beside others, but for coroutines: steps that are sampled
    ahead call tools while rewards are asked of another step.
    """

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}
        self.turn = threading.Lock()

    def load(self, text: str, key: str) -> UserFunction:
        """The function or class that `FILE.py:function` names under this key of the job.

        Its file is run, and can import what lies in its folder. ConfigError, in one line, where that fails.
        """
        file, name = found_file(text, key)
        if file not in self._modules:
            self._modules[file] = _run(file)
        function = getattr(self._modules[file], name, None)
        if not callable(function):
            raise ConfigError(f"{file} has no function {name}", f"{key} names module:function")
        return UserFunction(name, file, function)


def found_file(text: str, key: str) -> tuple[Path, str]:
    """The file and the function that `FILE.py:function` names under this key of the job. ConfigError without a file."""
    file, name = function_parts(text)
    if not file.is_file():
        raise ConfigError(f"{key} names {name} of {file}, which is no file", "put the module beside the job's file")
    return file, name


def check_files(config: RolloutConfig) -> None:
    """The same for all functions and classes of a table; none of them is run."""
    environment = config.environment_factory
    named = {
        "reward_funcs": [text for text in config.reward_funcs if not is_url(text)],
        "tools": config.tools,
        "environment_factory": [] if environment is None else [environment],
    }
    for key, texts in named.items():
        for text in texts:
            found_file(text, key)


def _run(file: Path) -> ModuleType:
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"tllm_user_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None and module_spec.loader is not None, "its name ends with .py"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # where dataclasses look for what their annotations name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} raised {said(error)}", place_of(error, file) or file.name) from error
    return module


def called(call: Callable[[], Any], deadline: Deadline, name: str) -> Future[Any] | None:
    """What a call came to, a value or what it raised; None if it has not returned in time. It is left behind then, in
    its thread, or not begun where the time was over before."""
    result: Future[Any] = Future()
    if not deadline.turn():
        return None

    def run() -> None:
        with told_of_errors(result):
            result.set_result(call())

    thread = threading.Thread(target=run, name=f"tllm-{name}", daemon=True)
    thread.start()
    while thread.is_alive() and (turn := deadline.turn()):
        thread.join(turn)
    return result if result.done() else None


@contextmanager
def told_of_errors(result: Future[Any]) -> Iterator[None]:
    """What is raised within becomes the result's exception, whatever it is, and goes no further."""

    def fail(kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            result.set_exception(error)
        return True

    with ExitStack() as stack:
        stack.push(fail)
        yield


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
