"""A page of docs/ as a reader follows it: its fenced blocks and the keys that it tells the reader to press, in order.

The first word after a fence is the language. The words that follow it are for the test; neither GitHub nor the site
shows them:

| word | means |
|---|---|
| `on=b` | on machine b (a when left out) |
| `stays` | the command goes on by itself: it is left running, and ended when the page is at its end |
| `exit=2` | the exit code that the commands end with (0 when left out) |
| `file=job.toml` | the reader writes the block to this file |
| `later` | of `text`: printed by the machine's last command that stays, not by the block above |
| `exact` | of `text`: numbers are compared too, not only words |
| `shown` | the block is only shown, and not run |

`bash` is run. `text` is what the last bash block on that machine printed; if that stays, it is waited for. An HTML
comment such as `<!-- b: Ctrl-C -->` stands for a key that is pressed on that machine.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w{}-]*) *(?P<words>.*)$")
KEY = re.compile(r"^<!-- (?P<machine>[a-z]): (?P<key>Ctrl-C|Ctrl-Z|fg) -->$")
WORDS = {"on", "stays", "exit", "file", "later", "exact", "shown"}


@dataclass(frozen=True)
class Block:
    """A fenced block with the line of the page that it begins on."""

    line: int
    language: str
    text: str
    words: dict[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        return self.words.get("on", "a")


@dataclass(frozen=True)
class Key:
    """A key that the reader presses in the terminal of a machine's last command that stays."""

    line: int
    machine: str
    name: str


def read(page: Path) -> list[Block | Key]:
    """Everything that a reader does, from top to bottom."""
    found: list[Block | Key] = []
    lines = iter(enumerate(page.read_text("utf-8").splitlines(), 1))
    for number, line in lines:
        if key := KEY.match(line):
            found.append(Key(number, key["machine"], key["key"]))
        elif fence := FENCE.match(line):
            inside = []
            for _, one in lines:
                if one.startswith(fence["fence"]):
                    break
                inside.append(one)
            words = dict(word.partition("=")[::2] for word in shlex.split(fence["words"]))
            assert set(words) <= WORDS, f"{page.name}:{number}: {sorted(set(words) - WORDS)} means nothing"
            found.append(Block(number, fence["language"], "\n".join(inside) + "\n", words))
    return found
