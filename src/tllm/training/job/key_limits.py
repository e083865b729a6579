"""`KeyLimits`: the limits on the values of a job's keys, and of those in its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tllm.core.errors import ConfigError, PlanError, nearest
from tllm.spec.plan_text import rank_count


def check_task_tables(task: str, tables: Mapping[str, object], needed: Mapping[str, str]) -> None:
    """ConfigError for a table of another task, which nobody would read, and for a missing one that the task needs.

    `tables` has the value of each by its task; `needed` has, by task, a line that its table cannot do without.
    """
    for name, table in tables.items():
        if table is not None and name != task:
            raise ConfigError(f"[{name}] is given and the task is {task!r}", f'give task = "{name}", or leave it out')
    if task in needed and tables[task] is None:
        raise ConfigError(f"the task is {task!r} and there is no table [{task}]", f"write [{task}] and {needed[task]}")


AUTO = "auto"
"""In the place of how many nodes, or of a role's plan: as the planner finds best."""
ALONE = "pp=1"
"""The plan of a role's model that each node holds whole."""


TASKS_ELSEWHERE = {
    "ppo": 'give "grpo", which learns from rewards without a model of values',
    "rloo": 'give "grpo"',
    "rlhf": 'give "grpo" for rewards, "dpo" for pairs',
    "cpo": 'give "simpo", and cpo_alpha below [simpo]',
    "ipo": 'give "dpo", and loss_type = "ipo" below [dpo]',
    "rm": 'give "reward"',
    "pt": 'give "sft", with rows of "text"',
    "pretrain": 'give "sft", with rows of "text"',
    "lora": "leave it out, and write [lora]",
}
"""What other trainers call tasks."""


@dataclass(frozen=True)
class KeyLimits:
    """By key: the least value, the value that it must stay below, the texts that it may be, and what else is to be said
    of one that is too small."""

    at_least: Mapping[str, float] = field(default_factory=dict)
    below: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    def check(self, keys: Any, table: str = "") -> None:
        """ConfigError for the first value outside its limits of a dataclass of keys. `table` names where they stand, if
        not at the top."""
        for key, value in ((one.name, getattr(keys, one.name)) for one in fields(keys)):
            name = f"{table}.{key}" if table else key
            each = value if isinstance(value, tuple) else (value,)
            if not all(math.isfinite(one) for one in each if isinstance(one, float)):
                raise ConfigError(f"{name} is {value}", "give a finite number")
            if isinstance(value, int | float):
                if key in self.at_least and value < self.at_least[key]:
                    hint = self.hints.get(key, "")
                    raise ConfigError(f"{name} is {value} and must be {self.at_least[key]} or more", hint)
                if key in self.below and value >= self.below[key]:
                    raise ConfigError(f"{name} is {value} and must be less than {self.below[key]}")
            if key in self.choices and value not in self.choices[key]:
                said = TASKS_ELSEWHERE.get(str(value).lower()) if key == "task" else None
                raise ConfigError(f"{name} is {value!r}", said or nearest(str(value), self.choices[key]))


@dataclass(frozen=True)
class WantedNodes:
    """Which nodes of a run's own cluster are to have a role: so many, or those of these `names`, or as many as the
    planner finds best (`is_auto`)."""

    count: int = 0
    names: tuple[str, ...] = ()
    is_auto: bool = False

    @classmethod
    def of(cls, values: Sequence[int | str], key: str) -> WantedNodes:
        """What the value of a key says; ConfigError for what it cannot mean."""
        if not values:
            return cls()
        first = str(values[0])
        if len(values) == 1 and first == AUTO:
            return cls(is_auto=True)
        if len(values) == 1 and first.lstrip("-").isdecimal():
            if len(first) > 9 or int(first) < 1:
                raise ConfigError(f"{key} is {first[:40]}", "give 1 node or more, or leave it out")
            return cls(int(first))
        names = tuple(str(value) for value in values)
        for at, name in enumerate(names):
            if name == AUTO or name.lstrip("-").isdecimal():
                raise ConfigError(
                    f"{key} has {name!r} among {len(names)} values",
                    'give a number of nodes alone, or "auto" alone, or names of nodes',
                )
            if name in names[:at]:
                raise ConfigError(f"{key} names {name} twice", "name each node once")
        return cls(len(names), names)


def address_of(text: str, key: str) -> tuple[str, int]:
    """The host and port of "HOST:PORT"; ConfigError, which names the key, for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 2**16:
        raise ConfigError(f"{key} has {text!r}, which is not HOST:PORT", "for example 10.0.0.7:7070")
    return host.strip("[]"), int(port)


def check_one_place(addresses: Sequence[str], nodes: Sequence[int | str], key: str, nodes_key: str) -> None:
    """ConfigError where a role is both elsewhere and on nodes of the cluster, or on nodes that cannot be meant."""
    WantedNodes.of(nodes, nodes_key)
    if addresses and nodes:
        raise ConfigError(
            f"{key} gives addresses and {nodes_key} nodes of the cluster for the same role", "leave one of them out"
        )


def check_role_plan(table: str, role: str, plan: str, nodes: Sequence[int | str]) -> None:
    """ConfigError for a plan of a role that no nodes have, or for one that is none."""
    try:
        rank_count(ALONE if plan == AUTO else plan)
    except PlanError as error:
        raise ConfigError(f"{table}.{role}_plan: {error.message}", error.hint) from error
    if plan != ALONE and not nodes:
        raise ConfigError(
            f"{table}.{role}_plan is {plan!r} and {table}.{role}_nodes is left out: nobody divides the model",
            f"say which nodes have it, or leave {role}_plan out",
        )


def check_addresses(texts: Sequence[str], key: str) -> None:
    """ConfigError for a text that is no address, and for an address that is named twice."""
    for at, text in enumerate(texts):
        address_of(text, key)
        if text in texts[:at]:
            raise ConfigError(f"{key} names {text} twice", "name each server once")
