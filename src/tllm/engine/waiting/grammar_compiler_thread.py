"""`GrammarCompilerThread`: compiles grammars in a thread of its own, so that no batch waits for one.

A grammar takes some milliseconds, a large schema or the first one of a large vocabulary a second and more. The library
lets other threads run meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import msgspec

from tllm.core.errors import RequestError
from tllm.spec.request import Output, Request
from tllm.text.grammar import GrammarCompiler


class GrammarReady(msgspec.Struct, frozen=True):
    """The grammar of this request is compiled (`known`), or it is told again why it cannot be followed."""

    request: Request
    known: Any = None


class GrammarCompilerThread:
    """Holds requests back while their grammars are compiled; each then comes back by `put` as a GrammarReady.

    All but `put` is called from the driver's thread. A request that is held back does not wait in the queue yet: how
    long it may wait there counts from its return.
    """

    def __init__(self, compiler: GrammarCompiler, put: Callable[[GrammarReady], None]) -> None:
        self._compiler, self._put = compiler, put
        self._held: dict[str, Request] = {}
        self._thread = ThreadPoolExecutor(1, "tllm grammars")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def hold_back(self, request: Request) -> bool:
        """Begin to compile its grammar. False, and nothing is begun, where it has none or one that is compiled."""
        grammar = request.params.grammar
        if grammar is None or self._compiler.knows(grammar):
            return False
        self._held[request.id] = request
        self._thread.submit(self._compile, request)
        return True

    def release(self, ready: GrammarReady) -> bool:
        """Take back a request that was held back. False where it was cancelled meanwhile."""
        is_wanted = self._held.get(ready.request.id) is ready.request
        if is_wanted:
            del self._held[ready.request.id]
            if ready.known is not None and ready.request.params.grammar is not None:
                # More may have been compiled since than the compiler keeps.
                self._compiler.keep(ready.request.params.grammar, ready.known)
        return is_wanted

    def cancel(self, request_id: str) -> list[Output]:
        """Drop a request that is held back; nothing for any other."""
        if self._held.pop(request_id, None) is None:
            return []
        return [Output(request_id=request_id, finish_reason="cancelled")]

    def cancel_all(self) -> list[Output]:
        return [output for request_id in list(self._held) for output in self.cancel(request_id)]

    def _compile(self, request: Request) -> None:
        known = None
        try:
            assert request.params.grammar is not None, "it is held back for its grammar"
            with contextlib.suppress(RequestError):  # whoever asks for its matcher is told
                known = self._compiler.compile(request.params.grammar)
        finally:
            self._put(GrammarReady(request, known))
