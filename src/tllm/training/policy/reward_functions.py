"""`RewardFunction`: a Python function of the user's that says what completions are worth, with TRL's signature:

    def correct(prompts, completions, completion_ids, **columns) -> list[float | None]

Each argument is a list with an entry for each completion; `columns` are the other columns of the prompts' rows. None
says that the function has nothing to say of a completion. Completions of prompts that are texts are texts, of those
that are messages a list with one message.

This is the one place where code is loaded that is not part of the package: a file of the user's own, which the job
names, on rank 0 alone, in a process that the user's own command has started (`node.worker` sees to that). Nothing of it
ever comes from another machine.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm.core.errors import ConfigError
from tllm.training.job.rollout_keys import function_parts


@dataclass(frozen=True)
class RewardFunction:
    """A function of a file, by its `name`. It may take `seconds` for the completions of one step.

    One without a `file` asks another program, and raises ConfigError itself.
    """

    name: str
    file: Path | None
    function: Callable[..., Any]
    seconds: float

    def __call__(self, arguments: Mapping[str, Sequence[Any]]) -> list[float]:
        """A number for each completion, NaN for None; ConfigError for whatever is not that, in one line."""
        returned = self._returned(arguments)
        count = len(arguments["completions"])
        if isinstance(returned, str | bytes) or not hasattr(returned, "__len__") or not hasattr(returned, "__iter__"):
            raise self._fault(
                f"returned a {type(returned).__name__}", "return a list with a number for each completion"
            )
        if len(returned) != count:
            raise self._fault(f"returned {len(returned)} rewards for {count} completions", "return one for each")
        return [self._number(value, place) for place, value in enumerate(returned)]

    def _returned(self, arguments: Mapping[str, Sequence[Any]]) -> Any:
        """What the function returns, or its error as a ConfigError. One that hangs is left behind in its thread."""
        result: Future[Any] = Future()

        def fail(kind: object, error: BaseException | None, trace: object) -> bool:
            if error is not None:
                result.set_exception(error)
            return True

        def call() -> None:
            with ExitStack() as stack:
                stack.push(fail)
                result.set_result(self.function(**arguments))

        thread = threading.Thread(target=call, name=f"tllm-reward-{self.name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        if not result.done():
            raise self._fault(f"has not returned after {self.seconds:g} s", "make it faster, or raise reward_timeout")
        error = result.exception()
        if isinstance(error, ConfigError) and self.file is None:
            raise error
        if error is not None:
            said = str(error).splitlines()[0] if str(error) else "without a message"
            raise self._fault(f"raised {type(error).__name__}: {said}", _place(error, self.file)) from error
        return result.result()

    def _number(self, value: Any, place: int) -> float:
        if value is None:
            return math.nan
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise self._fault(
                f"returned {value!r:.100} for completion {place}", "return a number, or None for nothing to say"
            ) from error
        if not math.isfinite(number):
            raise self._fault(f"returned {number} for completion {place}", "return a finite number, or None")
        return number

    def _fault(self, what: str, hint: str) -> ConfigError:
        where = f"the reward function {self.name} of {self.file.name}" if self.file else f"the server at {self.name}"
        return ConfigError(f"{where} {what}", hint)


def load_reward_function(text: str, seconds: float) -> RewardFunction:
    """The function that `FILE.py:function` names. Its file is run, and can import what lies in its folder."""
    file, name = function_parts(text)
    if not file.is_file():
        raise ConfigError(
            f"reward_funcs names {name} of {file}, which is no file", "put the module beside the job's file"
        )
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_spec = importlib.util.spec_from_file_location(file.stem, file)
    assert module_spec is not None and module_spec.loader is not None, "its name ends with .py"
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else "without a message"
        raise ConfigError(f"{file} raised {type(error).__name__}: {said}", _place(error, file)) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{file} has no function {name}", "reward_funcs names module:function")
    return RewardFunction(name, file, function, seconds)


def _place(error: BaseException, file: Path | None) -> str:
    """The last line of the user's file that the error came through."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return (
        f"{file.name}, line {line}"
        if file and line
        else "its parameters: prompts, completions, completion_ids, **columns"
    )
