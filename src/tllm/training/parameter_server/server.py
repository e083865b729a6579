"""`ParameterServer`: one server of the parameter-server architecture, which takes gradients and gives weights.

A thread serves each replica, so that a slow one, or a slow link, keeps nobody else from being served. A replica has at
most one gradient and one request on its way, so nothing piles up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import torch
from torch import Tensor

from tllm.core.errors import FrameError, LinkClosed, LinkError
from tllm.training.parameter_server import messages as say
from tllm.training.parameter_server.connections import ReplicaLinks
from tllm.training.parameter_server.server_state import Gradient, ServerState, tree_sum
from tllm.training.parameter_server.stale_synchronous import StaleSynchronousClocks
from tllm.training.state.tensor_blocks import update_dtype


class SynchronousSum:
    """The gradients of one step as the replicas push them, and their sum when all have come.

    `step` is the last one that was summed, `square` the sum of squares of its gradient.
    """

    def __init__(self, replicas: int) -> None:
        self.step, self.square = 0, 0.0
        self._pushed: dict[int, Gradient | None] = {}
        self._losses = [0.0] * replicas
        self._total: Gradient | None = None

    def add(self, replica: int, push: say.Push, gradient: Gradient | None, state: ServerState) -> bool:
        """Take a replica's gradient of the step; whether it was the last one, and the sum is there."""
        self._pushed[replica], self._losses[replica] = gradient, push.loss
        if len(self._pushed) < len(self._losses):
            return False
        total = tree_sum([self._pushed[index] for index in range(len(self._losses))], state.segments)
        self._total = state.nothing() if total is None else total
        # Not finite where a loss is not.
        self.square = state.square(self._total) + sum(0.0 * loss for loss in self._losses)
        self._pushed, self.step = {}, push.step
        return True

    def take(self) -> Gradient | None:
        """The sum, once."""
        total, self._total = self._total, None
        return total


class SaveBarrier:
    """Which save each replica waits at. -1 is none, as even step 0 may be saved."""

    def __init__(self, replicas: int) -> None:
        self._waiting = [-1] * replicas
        self._saved = -1
        self.updates = 0
        """The updates taken when the last replica came to the save."""

    def resume(self, step: int) -> None:
        self._saved, self._waiting = step, [step] * len(self._waiting)

    def arrive(self, replica: int, step: int, updates: int) -> bool:
        """A replica waits for the save after `step`; whether all do now."""
        self._waiting[replica] = step
        if self.all_wait_for(step):
            self.updates = updates
            return True
        return False

    def all_wait_for(self, step: int) -> bool:
        return min(self._waiting) >= step

    @property
    def due(self) -> int | None:
        """The step of the save that every replica waits for and that is not made yet."""
        return min(self._waiting) if min(self._waiting) > self._saved else None

    def finish(self, step: int) -> None:
        """The save after `step` is made."""
        self._saved = step

    def is_finished(self, step: int) -> bool:
        return self._saved >= step


class ParameterServer:
    """Serves the replicas at `lines`, in their order, from `state`.

    Synchronous (`max_staleness` 0): the replicas' gradients of a step are added up as a group adds them and move the
    weights once: the numbers of data parallel. Else each gradient moves the weights when it comes.
    """

    def __init__(self, state: ServerState, lines: Sequence[ReplicaLinks], max_staleness: int = 0) -> None:
        self.state, self.lines = state, lines
        self.clocks = StaleSynchronousClocks(len(lines), max_staleness)
        self.updates = 0
        """How often the weights were moved: what the optimizer counts by."""
        self._synchronous = max_staleness == 0
        self._changed = Condition()
        self._failure: BaseException | None = None
        self._filled = False
        self._rows = [torch.empty(0, dtype=torch.int32)] * len(lines)
        self._sum = SynchronousSum(len(lines))
        self._saves = SaveBarrier(len(lines))
        self._left = 0

    def resume(self, step: int, updates: int) -> None:
        """Go on after a save of this step, which has filled `state.blocks()`; then no replica gives weights."""
        self.clocks.start(step)
        self.updates, self._sum.step, self._filled = updates, step, True
        self._saves.resume(step)

    def run(self, save: Callable[[int], None] = lambda step: None) -> None:
        """Serve until every replica said farewell. `save(step)` is called while all of them wait.

        What failed first, a link that names its rank mostly, ends every replica and is raised here.
        """
        with ThreadPoolExecutor(len(self.lines), "tllm-server") as pool:
            for replica in range(len(self.lines)):
                pool.submit(self._serve, replica)
            try:
                while (step := self._next_save()) is not None:
                    save(step)
                    with self._changed:
                        self._saves.finish(step)
                        self._changed.notify_all()
            except BaseException as failure:
                self._fail(failure)
                raise
        if self._failure is not None:
            raise self._failure

    def _next_save(self) -> int | None:
        """The step of the save that every replica waits for; None when there is none to come."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or self._left == len(self.lines) or self._saves.due is not None
            )
            return self._saves.due if self._failure is None else None

    def _serve(self, replica: int) -> None:
        line = self.lines[replica]
        try:
            while not isinstance(request := say.receive_request(line.recv), say.Farewell):
                self._answer(replica, line, request)
        except BaseException as failure:
            first = self._fail(self._why(line, failure))
            with contextlib.suppress(LinkError):
                say.send(line.send, say.failed(line.send.source, first))
            raise
        with self._changed:
            self.clocks.leave(replica)
            self._left += 1
            self._changed.notify_all()

    def _answer(self, replica: int, line: ReplicaLinks, request: say.Request) -> None:
        match request:
            case say.Give():
                self._take(self._segments(line, None, gradient=False))
            case say.Pull():
                self._give(replica, line, request)
            case say.Push():
                self._push(replica, line, request)
            case say.Apply():
                self._apply(request)
            case say.Save():
                self._pause(replica, line, request.step)
            case say.Failed():
                raise LinkClosed(request.message, request.hint)

    def _take(self, weights: list[Tensor]) -> None:
        with self._changed:
            self.state.receive_weights(weights)
            self._filled = True
            self._changed.notify_all()

    def _give(self, replica: int, line: ReplicaLinks, pull: say.Pull) -> None:
        rows = self._asked_rows(line, pull)
        with self._changed:
            self._wait(lambda: self._filled and self.clocks.may_read(pull.step))
            weights, clocks = self.state.weights(rows), self.clocks.pushed
        self._rows[replica] = rows
        say.send(line.send, say.Weights(clocks))
        for tensor in weights:
            line.send.send(tensor)

    def _asked_rows(self, line: ReplicaLinks, pull: say.Pull) -> Tensor:
        held = sum(segment.rows for segment in self.state.segments)
        if not 0 <= pull.rows <= held:
            raise FrameError(f"rank {line.recv.source} asks for {pull.rows} rows; rank {line.recv.target} holds {held}")
        rows = line.recv.recv((pull.rows,), torch.int32)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < held:
            raise FrameError(
                f"rank {line.recv.source} asks for rows {int(rows.min())} to {int(rows.max())}; "
                f"rank {line.recv.target} holds {held}"
            )
        return rows

    def _push(self, replica: int, line: ReplicaLinks, push: say.Push) -> None:
        if not self.clocks.follows(replica, push.step):
            raise FrameError(
                f"rank {line.recv.source} pushed step {push.step} after step {self.clocks.pushed[replica]}"
            )
        rows = self._rows[replica]
        gradient = None if push.empty else Gradient(self._segments(line, rows, gradient=True), rows)
        if self._synchronous:
            say.send(line.send, say.Square(self._add(replica, push, gradient)))
            return
        with self._changed:
            self._update(gradient, push.learning_rate)
            self.clocks.push(replica, push.step)
            self._changed.notify_all()

    def _add(self, replica: int, push: say.Push, gradient: Gradient | None) -> float:
        """The square of the sum over replicas, once all have come."""
        with self._changed:
            if self._sum.add(replica, push, gradient, self.state):
                self._changed.notify_all()
            self._wait(lambda: self._sum.step == push.step)
            return self._sum.square

    def _apply(self, apply: say.Apply) -> None:
        """Every replica says the same; the first to say it is heard."""
        with self._changed:
            if not self.clocks.follows(0, apply.step):
                return
            self._update(self._sum.take(), apply.learning_rate, apply.factor)
            for replica in range(len(self.lines)):
                self.clocks.push(replica, apply.step)
            self._changed.notify_all()

    def _update(self, gradient: Gradient | None, learning_rate: float, factor: float = 1.0) -> None:
        if gradient is not None:
            self.updates += 1
            self.state.update(gradient, self.updates, learning_rate, factor)

    def _pause(self, replica: int, line: ReplicaLinks, step: int) -> None:
        with self._changed:
            if self._saves.arrive(replica, step, self.updates):
                self._changed.notify_all()
            self._wait(lambda: self._saves.all_wait_for(step))
        say.send(line.send, say.Settled(self._saves.updates))
        with self._changed:
            self._wait(lambda: self._saves.is_finished(step))

    def _segments(self, line: ReplicaLinks, rows: Tensor | None, gradient: bool) -> list[Tensor]:
        """Weights or a gradient, as they come from a replica."""
        received = []
        for segment, dtype in zip(self.state.segments, self.state.dtypes, strict=True):
            shape = (len(rows), segment.row) if segment.row and rows is not None else (segment.size,)
            received.append(line.recv.recv(shape, update_dtype(dtype) if gradient else dtype))
        return received

    def _wait(self, ready: Callable[[], bool]) -> None:
        """With the lock held: until it is so, or the run has failed."""
        self._changed.wait_for(lambda: ready() or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _why(self, line: ReplicaLinks, failure: BaseException) -> BaseException:
        """A failure, or what the replica said of its end where that made its link fail."""
        words = say.last_words(line.recv) if isinstance(failure, LinkClosed) and not self._failure else None
        return words or failure

    def _fail(self, failure: BaseException) -> BaseException:
        """Wake every thread; what failed first is what counts, and is returned."""
        with self._changed:
            first = self._failure = self._failure or failure
            self._changed.notify_all()
        for line in self.lines:
            line.recv.close()
        return first
