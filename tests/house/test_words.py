"""One word for one thing (WORDS.md): the words that we do not use appear in no name of the source."""

from __future__ import annotations

import ast
import re

from tests.house.tree import ROOT, functions, name_of, nodes, sources

INSTEAD = {
    "master": "coordinator",
    "slave": "worker",
    "strategy": "plan",
    "partition": "stage, or shard",
}
IN_CLASSES_AND_FILES = {
    "handler": "worker, or what it does",
    "runner": "worker",
    "manager": "what it really is",
}
"""Words that Python itself uses (signal handlers), so that only our own nouns are held to the table."""

ALLOWED = {"partition", "rpartition"}
"""Methods of str."""


def test_no_banned_word_in_a_name() -> None:
    faults = []
    for path in sources():
        nouns = {(c.name, c.lineno) for c in nodes(path) if isinstance(c, ast.ClassDef)} | {(path.stem, 1)}
        names = {(f.name, f.lineno) for f in functions(path)}
        names |= {(a.arg, a.lineno) for a in nodes(path) if isinstance(a, ast.arg)}
        names |= {(n.id, n.lineno) for n in nodes(path) if isinstance(n, ast.Name)}
        for table, found in ((INSTEAD, names | nouns), (IN_CLASSES_AND_FILES, nouns)):
            for name, line in sorted(found, key=lambda pair: pair[1]):
                for word in _words(name) & set(table) if name not in ALLOWED else ():
                    faults.append(f"{name_of(path)}:{line}: {name}: say {table[word]} instead of {word}")
    assert not faults, "\n".join(faults)


def test_the_table_names_each_banned_word() -> None:
    table = (ROOT / "WORDS.md").read_text()
    missing = [word for word in {**INSTEAD, **IN_CLASSES_AND_FILES} if word not in table]
    assert not missing, f"WORDS.md does not say what to use instead of {missing}"


def _words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in lower case and in the singular."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}
