"""One word for one thing (WORDS.md): the words that we do not use appear in no name of the source."""

from __future__ import annotations

import ast
import re

from tests.house.tree import ROOT, functions, name_of, parse, sources

INSTEAD = {
    "master": "coordinator",
    "slave": "worker",
    "runner": "worker",
    "handler": "worker, or the verb it does",
    "strategy": "plan",
    "partition": "stage, or shard",
    "manager": "what it really is",
}
ALLOWED = {
    "add_exception_handler",  # Starlette's
    "exception_handlers",
    "set_exception_handler",  # asyncio's
    "add_signal_handler",
    "remove_signal_handler",
    "partition",  # str.partition
    "rpartition",
}


def test_no_banned_word_in_a_name() -> None:
    faults = []
    for path in sources():
        names = {(f.name, f.lineno) for f in functions(path)}
        names |= {(a.arg, a.lineno) for a in ast.walk(parse(path)) if isinstance(a, ast.arg)}
        names |= {(c.name, c.lineno) for c in ast.walk(parse(path)) if isinstance(c, ast.ClassDef)}
        names |= {(n.id, n.lineno) for n in ast.walk(parse(path)) if isinstance(n, ast.Name)}
        names |= {(path.stem, 1)}
        for name, line in sorted(names, key=lambda pair: pair[1]):
            for word in _words(name) & set(INSTEAD) if name not in ALLOWED else ():
                faults.append(f"{name_of(path)}:{line}: {name}: say {INSTEAD[word]} instead of {word}")
    assert not faults, "\n".join(faults)


def test_the_table_names_each_banned_word() -> None:
    table = (ROOT / "WORDS.md").read_text()
    missing = [word for word in INSTEAD if word not in table]
    assert not missing, f"WORDS.md does not say what to use instead of {missing}"


def _words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in lower case and in the singular."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}
