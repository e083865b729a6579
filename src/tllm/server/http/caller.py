"""`Caller`: who asks for a reply, and how long they want to wait for its beginning."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.types import Scope

from tllm.core.errors import RequestError
from tllm.server.admission.account import Account
from tllm.server.http.auth import account_of
from tllm.server.http.settings import ServerSettings
from tllm.spec.request import Scheduling

QUEUE_HEADER = "x-max-queue-seconds"
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?\Z", re.ASCII)


@dataclass(frozen=True)
class Caller:
    """The account of a request's key.

    `max_queue_seconds` is what the request's own header says, if it has one; 0: begin at once or not at all.
    """

    account: Account
    max_queue_seconds: float | None = None

    def scheduling(self, priority: int | None, settings: ServerSettings) -> Scheduling:
        """When the request begins among others: its own `priority` counts as far as policy and key allow.

        RequestError for a priority where the server hears none.
        """
        key = self.account.key
        if priority and settings.scheduling_policy != "priority":
            message = f"priority is {priority}, and this server takes requests in order of arrival"
            raise RequestError(
                message, "leave it out, or start the server with --scheduling-policy priority", "priority"
            )
        urgent = priority if priority is not None else key.priority or 0
        if key.priority is not None:
            urgent = max(urgent, key.priority)
        waits = [
            seconds for seconds in (self.max_queue_seconds, settings.max_queue_seconds or None) if seconds is not None
        ]
        return Scheduling(
            tenant=key.name,
            weight=key.weight,
            priority=urgent,
            max_queue_seconds=min(waits, default=None),
        )


def caller_of(scope: Scope) -> Caller:
    """Who asks. RequestError for a header that is no number of seconds."""
    account = account_of(scope)
    assert account is not None, "a route that generates needs a key"
    given = [value for key, value in scope["headers"] if key == QUEUE_HEADER.encode()]
    if not given:
        return Caller(account)
    text = given[0].decode("latin-1")
    if len(given) > 1 or not _SECONDS.match(text):
        raise RequestError(f"{QUEUE_HEADER} is {text[:50]!r}", "give a number of seconds, such as 30", QUEUE_HEADER)
    return Caller(account, float(text))
