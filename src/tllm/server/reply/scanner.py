"""`Scanner`: reads text that comes in pieces, so that what is found never depends on where the pieces were cut.

A parser is a generator over a scanner: it yields events, and where the text at hand decides nothing it waits for more
(it yields None, in the methods here, which are generators too). `Parsing` runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from tllm.server.reply.events import ReplyEvent

T = TypeVar("T")
Steps = Generator[ReplyEvent | None, None, T]
Emit = Callable[[str], ReplyEvent]
Parser = Callable[["Scanner"], Steps[None]]

MAX_HELD = 1 << 20
"""Characters that a parser may hold while it does not know yet what they are: a name, a header, a parameter. A tool
that writes a file has all of it in a parameter, so this is more than a reply has."""


class Scanner:
    """The text that came and is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.space = ""  # that was left out before the last mark
        self.is_ended = False

    def skip_space(self) -> Steps[str]:
        """Read white space, all that there is; gives it."""
        space = ""
        while True:
            rest = self.text.lstrip()
            space += self.text[: len(self.text) - len(rest)]
            self.text = rest
            if rest or self.is_ended:
                return space
            yield None

    def comes(self, mark: str) -> Steps[bool]:
        """Whether this text comes next, which is not read."""
        while len(self.text) < len(mark) and mark.startswith(self.text) and not self.is_ended:
            yield None
        return self.text.startswith(mark)

    def take(self, mark: str) -> Steps[bool]:
        """Read this text if it comes next; whether it did."""
        if not (yield from self.comes(mark)):
            return False
        self.text = self.text[len(mark) :]
        return True

    def breaks_off(self, marks: tuple[str, ...]) -> bool:
        """Whether the reply ended before one of these texts was whole; what there is of it is left out."""
        if not self.is_ended or not any(mark.startswith(self.text) for mark in marks):
            return False
        self.text = ""
        return True

    def end(self, mark: str) -> Steps[None]:
        """Read the text that ends something, or what a reply that broke off has of it, and white space around."""
        yield from self.skip_space()
        if not (yield from self.take(mark)):
            self.breaks_off((mark,))
        yield from self.skip_space()

    def until(self, marks: tuple[str, ...], emit: Emit, strip: bool = False) -> Steps[str]:
        """Emit what stands before the first of these marks, and read it; gives the mark, or "" at the end.

        No mark may begin another one. With `strip`, white space before a mark is left out and in `space`.
        """
        while True:
            at, mark = self._first(marks)
            if mark:
                before, self.text = self.text[:at], self.text[at + len(mark) :]
                kept = before.rstrip() if strip else before
                before, self.space = kept, before[len(kept) :]
                if before:
                    yield emit(before)
                return mark
            if strip and not self.is_ended:
                at = len(self.text[:at].rstrip())
            if at:
                before, self.text = self.text[:at], self.text[at:]
                yield emit(before)
            if self.is_ended:
                return ""
            yield None

    def text_until(self, marks: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """The text before the first of these marks and the mark, both read; ("", "") where none comes in time.

        What holds no mark is put aside, so that it is looked through once however many pieces follow.
        """
        aside, size = list[str](), 0
        while True:
            at, mark = self._first(marks)
            if size + at > MAX_HELD or (self.is_ended and not mark):
                self.text = "".join((*aside, self.text))
                return "", ""
            aside.append(self.text[:at])
            size, self.text = size + at, self.text[at + len(mark) :]
            if mark:
                return "".join(aside), mark
            yield None

    def _first(self, marks: tuple[str, ...]) -> tuple[int, str]:
        """The first mark and where it begins; or "" and where one might begin that is not whole yet, or the end."""
        found = min(((at, mark) for mark in marks if (at := self.text.find(mark)) >= 0), default=(len(self.text), ""))
        if self.is_ended:
            return found
        longest = max(map(len, marks), default=1)
        for at in range(max(0, len(self.text) - longest + 1), found[0]):
            tail = self.text[at:]
            if any(len(tail) < len(mark) and mark.startswith(tail) for mark in marks):
                return at, ""
        return found


class Parsing:
    """A parser at work. `push` and `finish` give the events that follow from the text so far."""

    def __init__(self, parser: Parser) -> None:
        self._scanner = Scanner()
        self._steps = parser(self._scanner)

    def push(self, text: str) -> list[ReplyEvent]:
        self._scanner.text += text
        return self._run()

    def finish(self) -> list[ReplyEvent]:
        """No text will follow."""
        self._scanner.is_ended = True
        return self._run()

    def _run(self) -> list[ReplyEvent]:
        events = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events
