"""`RewardFunction`: a Python function of the user's that says what completions are worth, with TRL's signature:

    def correct(prompts, completions, completion_ids, **columns) -> list[float | None]

Each argument is a list with an entry for each completion; `columns` are the other columns of the prompts' rows. None
says that the function has nothing to say of a completion. Completions of prompts that are texts are texts, of those
that are messages a list with one message, or where the job has tools with those of all turns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm.core.errors import ConfigError, counted
from tllm.core.timing import Deadline
from tllm.training.tools.user_functions import UserModules, called, place_of, said

ALWAYS = ("prompts", "completions", "completion_ids")
"""What every function is called with, beside the columns of the rows."""


@dataclass(frozen=True)
class RewardFunction:
    """A function of a file, by its `name`. All of a job may take `seconds` together for the completions of one step.

    One without a `file` asks another program, and raises ConfigError itself.
    """

    name: str
    file: Path | None
    function: Callable[..., Any]
    seconds: float

    def __call__(self, arguments: Mapping[str, Sequence[Any]], deadline: Deadline | None = None) -> list[float]:
        """A number for each completion, NaN for None; ConfigError for whatever is not that, in one line. `deadline` is
        that of all functions, without which it is alone."""
        returned = self._returned(arguments, deadline or Deadline(self.seconds))
        count = len(arguments["completions"])
        if isinstance(returned, str | bytes) or not hasattr(returned, "__len__") or not hasattr(returned, "__iter__"):
            raise self._fault(
                f"returned a {type(returned).__name__}", "return a list with a number for each completion"
            )
        if len(returned) != count:
            raise self._fault(
                f"returned {counted(len(returned), 'reward')} for {counted(count, 'completion')}", "return one for each"
            )
        return [self._number(value, place) for place, value in enumerate(returned)]

    def check_signature(self) -> None:
        """ConfigError for a function that cannot take what every one is called with, or that is a coroutine."""
        hint = f"write it as def {self.name}(prompts, completions, **columns)"
        if inspect.iscoroutinefunction(self.function):
            raise self._fault("is async, and its rewards are waited for", hint)
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # of a function in C
            return
        try:
            signature.bind_partial(**dict.fromkeys(ALWAYS))
        except TypeError as error:
            raise self._fault(f"is called with {', '.join(ALWAYS)}, and is {self.name}{signature}", hint) from error

    def _returned(self, arguments: Mapping[str, Sequence[Any]], deadline: Deadline) -> Any:
        """What the function returns, or its error as a ConfigError. One that hangs is left behind in its thread."""
        result = called(lambda: self.function(**arguments), deadline, f"reward-{self.name}")
        if result is None:
            what = f"has not returned: those of one step have {self.seconds:g} s together"
            raise self._fault(what, "make it faster, or raise reward_timeout")
        error = result.exception()
        if isinstance(error, ConfigError) and self.file is None:
            raise error
        if error is not None:
            place = place_of(error, self.file) if self.file else ""
            raise self._fault(f"raised {said(error)}", place or f"it is called with {', '.join(arguments)}") from error
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


def load_reward_function(text: str, seconds: float, modules: UserModules) -> RewardFunction:
    """The function that `FILE.py:function` names; ConfigError for one that cannot be called as rewards are asked for,
    which a run would else meet when it has sampled its first completions."""
    found = modules.load(text, "reward_funcs")
    function = RewardFunction(found.name, found.file, found.function, seconds)
    function.check_signature()
    return function
