"""Stop strings in text that arrives in pieces: text that may begin one is held back until that is known."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Cuts a text at the stop string that is complete first.

    Of several that end at the same character the longest counts. The answer depends on the text alone,
    not on how it was cut into pieces. In text that comes early (before `min_tokens`) a stop string may begin, but none
    ends there, as in vLLM.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self._early = 0  # characters of what is held, from its beginning, in which no stop string ends
        self.found: str | None = None

    def push(self, text: str, is_early: bool = False) -> str:
        """Add text and return what can be given out for good. After a stop was found nothing more comes."""
        if self.found is not None or not self._stops:
            return text if self.found is None else ""
        held = self._held + text
        if is_early:
            self._early = len(held)
        ends = []
        for stop in self._stops:
            place = held.find(stop, max(0, self._early + 1 - len(stop)))
            if place >= 0:
                ends.append((place + len(stop), -len(stop), stop))
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return held[: end if self._include else end - len(self.found)]
        given = len(held) - self._possible(held)
        self._held, self._early = held[given:], max(0, self._early - given)
        return held[:given]

    def finish(self) -> str:
        """What is still held back, when the text is over without a stop."""
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
