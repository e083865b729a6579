"""`Environments`: objects of the user's own, one for each completion, whose methods are tools with state.

The rules are those of TRL's `environment_factory`:

- The factory is called without arguments, once for each completion that is under way at a time; later completions use
  the same objects again.
- `reset(**row)` is called before each completion with the columns of its prompt's row. A text that it returns is put at
  the end of the prompt's last message.
- Public methods are tools, but for `reset` and `get_reward`. `get_reward()` is one more reward, of weight 1.
- Reward functions get the objects of all completions as `environments`.

Where a run goes on, the completions of its next step are begun anew, and so are their environments: no state is saved.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from tllm.core.errors import ConfigError
from tllm.core.timing import Deadline
from tllm.training.tools.user_functions import UserFunction, UserModules, called, place_of, said

RESET, REWARD = "reset", "get_reward"


class Environment(NamedTuple):
    """What the factory made, and its methods that the model may call, by name."""

    instance: Any
    methods: Mapping[str, UserFunction]


class Environments:
    """Of a job, on rank 0. ConfigError, in one line, for whatever cannot go on; making and resetting the environments
    of a step may take `seconds` together."""

    def __init__(self, text: str, seconds: float, modules: UserModules) -> None:
        self._factory, self._seconds = modules.load(text, "environment_factory"), seconds
        self._turn = modules.turn
        self._taken: dict[int, Environment] = {}
        first = self._made(Deadline(seconds))
        self._free = deque([first])
        self.tools = tuple(first.methods.values())
        self.has_reward = callable(getattr(first.instance, REWARD, None))
        self._check(first)

    @property
    def name(self) -> str:
        """The factory's, by which its reward is told."""
        return self._factory.name

    @property
    def file(self) -> Path:
        return self._factory.file

    def begin(self, seeds: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Reset an environment for each completion, known by its seed, with its row: what each adds to its prompt."""
        with self._turn:
            deadline = Deadline(self._seconds)
            return [self._begun(seed, row, deadline) for seed, row in zip(seeds, rows, strict=True)]

    def methods(self, seed: int) -> Mapping[str, UserFunction]:
        """The tools of a completion that has begun."""
        return self._taken[seed].methods

    def instances(self, seeds: Sequence[int]) -> list[Any]:
        """The objects of these completions."""
        return [self._taken[seed].instance for seed in seeds]

    def end(self, seeds: Sequence[int]) -> None:
        """These completions are done: others may have their environments."""
        self._free.extend(self._taken.pop(seed) for seed in seeds)

    def _begun(self, seed: int, row: Mapping[str, Any], deadline: Deadline) -> str:
        taken = self._taken[seed] = self._free.popleft() if self._free else self._made(deadline)
        own = deepcopy(dict(row))  # what an environment changes is its own, and not of others of the row
        added = self._value(self._called(lambda: getattr(taken.instance, RESET)(**own), deadline), RESET)
        if added is not None and not isinstance(added, str):
            raise self._fault(
                f"returned a {type(added).__name__} from {RESET}", "return a text for the prompt's end, or None"
            )
        return added or ""

    def _made(self, deadline: Deadline) -> Environment:
        made: Environment = self._value(self._called(self._make, deadline), "its making")
        return made

    def _make(self) -> Environment:
        instance = self._factory.function()
        methods = {
            name: UserFunction(name, self._factory.file, method)
            for name, method in inspect.getmembers(instance, inspect.ismethod)
            if not name.startswith("_") and name not in (RESET, REWARD)
        }
        return Environment(instance, methods)

    def _check(self, first: Environment) -> None:
        if not callable(getattr(first.instance, RESET, None)):
            raise self._fault(f"makes a {type(first.instance).__name__} without {RESET}", "write reset(self, **row)")
        if not first.methods:
            raise self._fault("has no public method that the model could call", "give it one beside reset")
        for name in (RESET, REWARD):
            if inspect.iscoroutinefunction(getattr(first.instance, name, None)):
                raise self._fault(f"has a coroutine {name}", "write it as a plain method: only tools may be coroutines")

    def _called(self, call: Callable[[], Any], deadline: Deadline) -> Future[Any] | None:
        return called(call, deadline, f"environment-{self.name}")

    def _value(self, outcome: Future[Any] | None, what: str) -> Any:
        if outcome is None:
            raise self._fault(
                f"has not returned from {what}: those of one step have {self._seconds:g} s together",
                "make it faster, or raise reward_timeout",
            )
        error = outcome.exception()
        if error is not None:
            place = place_of(error, self._factory.file)
            raise self._fault(f"raised {said(error)} in {what}", place or f"look at {self._factory.file}") from error
        return outcome.result()

    def _fault(self, what: str, hint: str) -> ConfigError:
        return ConfigError(f"the environment {self.name} of {self._factory.file.name} {what}", hint)
