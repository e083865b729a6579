"""`AnsweringPart`: one node answers runs, alone or as one rank of several that hold the model together."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tllm.node.answering.answering_team import AnsweringTeam, LeadingModel
from tllm.node.answering.timed_answerer import TimedAnswerer
from tllm.training.questions.answerer_places import AskingRun
from tllm.training.questions.question_server import QuestionServer
from tllm.training.questions.run_connection import Conversation

LOOK_SECONDS = 0.2


class AnsweringDoor(NamedTuple):
    """Where the first rank listens for runs, whose certificates it trusts, and which of them may ask (all, if None)."""

    address: tuple[str, int]
    context: ssl.SSLContext
    asker: Callable[[], AskingRun | None] | None = None


class AnsweringPart:
    """With a `door` this is the first rank, which listens from now on; each other one does what the first tells.

    `model` is the rank's part of what answers. `is_over`: it answers no more.
    """

    def __init__(
        self,
        conversation: Conversation[Any, Any, Any],
        model: Any,
        team: AnsweringTeam | None,
        door: AnsweringDoor | None,
    ) -> None:
        assert door is not None or team is not None, "a rank that does not answer is one of several"
        self._conversation, self._model, self._team = conversation, model, team
        self._server: QuestionServer[Any, Any, Any] | None = None
        self._over = threading.Event()
        self._timed = TimedAnswerer(model if team is None else LeadingModel(model, team))
        if door is not None:
            self._server = QuestionServer(self._timed, conversation, *door)

    @property
    def port(self) -> int:
        """Where runs are answered; 0 on ranks that are not the first."""
        return 0 if self._server is None else self._server.address[1]

    def stats(self) -> dict[str, float]:
        """Questions that were `answered` so far, and what the `TimedAnswerer` tells; on ranks that are not the first
        nothing."""
        if self._server is None:
            return {"answered": 0.0}
        return {"answered": float(self._server.answered), **self._timed.stats()}

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def is_broken(self) -> bool:
        """Whether it ended because another rank of its team did."""
        return self._team is not None and self._team.is_broken.is_set()

    def run(self, is_wanted: Callable[[], bool]) -> bool:
        """Answer until it is interrupted, or nobody wants it any more, or another rank is lost; whether one was."""
        if self._server is None:
            assert self._team is not None, "checked when it was made"
            if is_wanted():
                self._team.follow(self._model, self._conversation)
            return self._end()
        serving = threading.Thread(target=self._server.serve, name="tllm answers", daemon=True)
        serving.start()
        try:
            # What came while the model was loaded found no role to wake.
            while not (self._over.wait(LOOK_SECONDS) or self.is_broken) and is_wanted():
                pass
        finally:
            has_lost = self._end()  # before the server waits for the question at hand
            self._server.close()
            serving.join()
        return has_lost

    def interrupt(self) -> None:
        """End it, from any thread: whoever waits for another rank is woken."""
        self._over.set()
        if self._team is not None:
            self._team.interrupt()

    def _end(self) -> bool:
        """Answer no more; whether another rank was lost before, and not by our own doing."""
        has_lost = self.is_broken and not self.is_over
        self.interrupt()
        return has_lost

    def close(self) -> None:
        self._over.set()
        if self._team is not None:
            self._team.close()
        if self._server is not None:
            self._server.close()
