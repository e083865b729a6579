"""Between the routes and the engine: what the server needs of an engine, and how a choice runs on it.

`EngineClient` is all that the server knows of an engine. `RequestRouter` admits sequences and runs them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import msgspec

from tllm.core.errors import ClusterError, TllmError, counted
from tllm.server.admission.account import Account, Charge
from tllm.server.admission.drain_rate import DrainRate
from tllm.server.admission.key_ring import KeyRing
from tllm.server.http.errors import HttpError, as_http, draining, overloaded, queue_timeout, rate_limited
from tllm.server.http.metrics import Metrics, SequenceTimer
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.choice import ChoiceProgress, ReplyChoice
from tllm.server.tracing.request_trace import traced
from tllm.spec.request import Output, Request


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is. `node` and `reason` say who and what is at fault where something is.

    `waits_for`: the node that what runs waits for, though nothing may be wrong with it.
    """

    alive: bool = True
    ready: bool = True
    running: int = 0
    seconds_since_step: float = 0.0  # since any step of any kind was done; counts only while something runs
    node: str = ""
    reason: str = ""
    waits_for: str = ""


class EngineClient(Protocol):
    """What the server needs of an engine, wherever it runs.

    `submit` gives the request's outputs as they come, under its id; closing it cancels the request. It raises
    `RequestError` where the request cannot be served as written, `NonFiniteError` where the model comes to no numbers
    for it and `ClusterError` where a node was lost. `stats` may hold running, waiting, kv_usage, preemptions,
    prefix_queries, prefix_hits and more.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def submit(self, request: Request) -> AsyncGenerator[Output, None]: ...

    def stats(self) -> Mapping[str, float]: ...

    def status(self) -> Mapping[str, Any]: ...

    def health(self) -> Health: ...


OTHERS_SHARE = 3
"""Where there are several keys, one may have at most so many times the places in hand that are still free.

So a key alone gets three quarters of them, and two get three sevenths each: whoever comes later finds room. This is the
rule of dynamic thresholds for shared buffers (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6, 1998).
"""


LOST = {429, 500, 503}
"""How a reply ends that the server failed to give. What took too long, or is refused as written, was computed."""


class RequestRouter:
    """Hands requests to the engine. It refuses those beyond `max_sequences`, those beyond what their key may use, and
    all while it is `draining`.

    `in_hand` are the sequences that run or wait, `readers` those who read replies that are kept. So many of those in
    hand are `lasting`: asked for by other nodes, or kept. While this process is `leaving`, and another will go on with
    them, they are still taken, and not waited for. Each sequence is timed for the metrics: `open` has the timers of
    those that the engine has, by the id of their request.
    """

    def __init__(self, client: EngineClient, metrics: Metrics, settings: ServerSettings, keys: KeyRing) -> None:
        self.client = client
        self.metrics = metrics
        self.max_sequences = settings.max_sequences
        self.request_seconds = settings.request_seconds
        self.keys = keys
        self.in_hand = self.readers = self.lasting = 0
        self.open: dict[str, SequenceTimer] = {}
        self.draining = self.leaving = False
        self._drain_rate = DrainRate(time.monotonic)

    def check(self, account: Account, prompt_tokens: int = 0, max_tokens: int = 0) -> None:
        """`HttpError` where the account gets nothing now for a request of this size; without a prompt, of any size."""
        refusal = account.refusal(prompt_tokens, max_tokens)
        if refusal is not None:
            self.metrics.keys.refused(account.key.name, refusal.limit)
            raise rate_limited(refusal)

    def check_count(self, count: int) -> None:
        """HttpError for a request of more sequences than are ever taken."""
        if count > self.max_sequences:
            message = (
                f"the request asks for {counted(count, 'sequence')}, at most {self.max_sequences} are taken at once"
            )
            raise HttpError(400, f"{message} (split the request)", code="too_many_sequences")

    @contextmanager
    def admit(
        self, count: int, account: Account, prompt_tokens: int, max_tokens: int, lasting: bool = False
    ) -> Iterator[Charge]:
        """Room for `count` sequences on an account, given back at the end; `HttpError` 429 or 503 where there is none.

        `max_tokens` is the most that all of them may generate. The block tells the charge what they use.
        """
        if self.draining and not (lasting and self.leaving):
            raise draining()
        self.check_count(count)
        self._check_room(count, account)
        self.check(account, prompt_tokens, max_tokens)
        self.metrics.keys.admitted(account.key.name)
        with self.held(count, lasting), account.charged(count, prompt_tokens, max_tokens) as charge:
            try:
                yield charge
            except TllmError as error:
                if as_http(error).status in LOST:
                    charge.lost()
                raise
            finally:
                if charge.has_begun:
                    self.metrics.keys.used(account.key.name, charge.prompt_tokens, charge.cached, charge.generated)
                elif charge.computed_only:
                    self.metrics.keys.used(account.key.name, charge.computed_only, 0, 0)

    @contextmanager
    def held(self, count: int, lasting: bool = True) -> Iterator[None]:
        """So many more sequences are in hand, though there be no room: those that another process had admitted."""
        self.in_hand += count
        self.lasting += count if lasting else 0
        try:
            yield
        finally:
            self.in_hand -= count
            self.lasting -= count if lasting else 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in hand that would end with this process."""
        return not self.readers and self.in_hand == (self.lasting if self.leaving else 0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reply is read that somebody else runs and has paid for; `HttpError` 503 while draining."""
        if self.draining:
            raise draining()
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1

    def _check_room(self, count: int, account: Account) -> None:
        free = self.max_sequences - self.in_hand
        if count > free:
            hand = counted(self.in_hand, "sequence is", "sequences are")
            message = f"{hand} in hand and {self.max_sequences} the most"
            raise overloaded(message, self._drain_rate.seconds_to_end(count - free))
        most = OTHERS_SHARE * free
        if len(self.keys.accounts) > 1 and account.sequences + count > most:
            key = f"the key {account.key.name}"
            message = (
                f"{counted(account.sequences, f'sequence of {key} is', f'sequences of {key} are')} in hand, "
                f"and {most} the most while {free} of {counted(self.max_sequences, 'place is', 'places are')} free"
            )
            raise overloaded(message, self._drain_rate.seconds_to_end(count))

    @contextmanager
    def _timed(self, request: Request) -> Iterator[SequenceTimer]:
        """The request is with the engine while the block goes on."""
        timer = self.open[request.id] = SequenceTimer(self.metrics.sequences, len(request.prompt_ids))
        try:
            yield timer
        except TllmError:
            timer.reason = "error"
            raise
        finally:
            del self.open[request.id]
            timer.close()
            self._drain_rate.ended()

    async def pool(self, request: Request, look: Callable[[Output], None] = lambda output: None) -> Output:
        """What a prompt comes to that is pooled. Cancelling this cancels it; an engine's error is raised.

        Each output goes to `look`.
        """
        with self._timed(request) as timer:

            def check(output: Output) -> None:
                self._check_end(output, request)
                timer.computes(output.computed_tokens)
                look(output)

            output = await pooled_output(self.client, traced(request, timer), check)
            timer.pooled()
            return output

    async def run(
        self, choice: ReplyChoice, look: Callable[[Output], None] = lambda output: None
    ) -> AsyncGenerator[ChoiceProgress, None]:
        """Run one choice to its end. Closing this cancels its sequence; an engine's error is raised.

        Each output goes to `look` before anything is made of it. Of those that only say how much of the prompt is
        computed nothing else is made: nobody's reply begins with them.
        """
        with self._timed(choice.request) as timer:
            async with aclosing(self.client.submit(traced(choice.request, timer))) as outputs:
                async for output in outputs:
                    look(output)
                    if output.computed_tokens:
                        timer.computes(output.computed_tokens)
                        continue
                    self._check_end(output, choice.request)
                    timer.count(len(output.token_ids))
                    progress = choice.read(output)
                    timer.reason = choice.finish_reason or timer.reason
                    yield progress
                    if choice.finish_reason is not None:
                        return
            raise HttpError(500, "the engine ended the request without a reason", "server_error", "engine_error")

    async def read(
        self, choices: Sequence[ReplyChoice], outputs: AsyncGenerator[Output, None]
    ) -> AsyncGenerator[ChoiceProgress, None]:
        """What all choices of a reply make of outputs that come mixed, until each has ended or there are no more.

        An output says by its request whose it is; those of a choice that has ended are dropped.
        """
        running = {choice.request.id: choice for choice in choices}
        async with aclosing(outputs):
            async for output in outputs:
                choice = running.get(output.request_id)
                if choice is None:
                    continue
                self._check_end(output, choice.request)
                yield choice.read(output)
                if choice.finish_reason is not None:
                    del running[output.request_id]
                if not running:
                    return

    def _check_end(self, output: Output, request: Request) -> None:
        """HttpError where the engine ended a request before its time."""
        if output.finish_reason == "expired":
            raise self._expired(request)
        if output.finish_reason in ("error", "cancelled"):
            reason = output.error or f"the engine ended the request: {output.finish_reason}"
            raise HttpError(500, reason, "server_error", f"engine_{output.finish_reason}")

    def _expired(self, request: Request) -> HttpError:
        waiting = int(self.client.stats().get("waiting", 0))
        return queue_timeout(
            request.scheduling.max_queue_seconds or 0.0, waiting, self._drain_rate.seconds_to_end(waiting + 1)
        )


async def pooled_output(
    client: EngineClient, request: Request, check: Callable[[Output], None] = lambda output: None
) -> Output:
    """The one output of a request that is pooled. Each goes to `check`; ClusterError where there is none."""
    async with aclosing(client.submit(request)) as outputs:
        async for output in outputs:
            check(output)
            if output.finish_reason == "stop" and output.pooled:
                return output
    raise ClusterError("the engine ended a request that is pooled without what it comes to", "ask again")
