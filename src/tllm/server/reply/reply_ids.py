"""`ReplyIds`: every id in a reply, and its time, from one number: made again from it they are the same."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256


@dataclass
class ReplyIds:
    """The ids of one reply. `stem` are 32 hexadecimal digits that nobody can guess, `created` is in Unix seconds.
    `is_again`: the reply is there already, and only read once more.

    A reply that is made once more of the same outputs, perhaps on another machine, is to be the same to the byte. So
    the ids of its parts are not drawn, but follow from the stem and from how many of their kind there were before.
    """

    stem: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    is_again: bool = False
    _given: Counter[str] = field(default_factory=Counter)

    def request(self, place: int) -> str:
        """What the engine's request of the choice at that place is called."""
        return f"{self.stem}-{place}"

    def new(self, kind: str) -> str:
        """The next id of that kind, as in `call_4f0c…`."""
        self._given[kind] += 1
        return f"{kind}_{sha256(f'{self.stem} {kind} {self._given[kind]}'.encode()).hexdigest()[:32]}"
