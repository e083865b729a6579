"""`TurnsAhead`: completions of several turns that are sampled ahead: servers write, and rank 0 runs the tool calls.

All turns of a step are written with the weights that the step was asked for with, whatever the trainer has learned
since. The turns of one step follow those of the step before: a server holds one version of the weights, and would
otherwise need another one at every turn.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait

from tllm.training.policy.rollouts import Completion, CompletionSampling, RolloutOrder
from tllm.training.policy.tool_turns import StepTurns, Tools, play_again
from tllm.training.questions.remote_answerer import LOOK_SECONDS
from tllm.training.questions.waiting_ranks import Still, nobody
from tllm.training.rollout_servers.remote_rollouts import FixedWeights, RemoteRollouts, groups_of
from tllm.training.tools.user_functions import told_of_errors


class TurnsAhead:
    """Rank 0's: a thread that samples the turns of one step after another."""

    def __init__(self, rollouts: RemoteRollouts, tools: Tools, sampling: CompletionSampling) -> None:
        self._rollouts, self._tools, self._sampling = rollouts, tools, sampling
        self._waiting = queue.SimpleQueue[AskedTurns | None]()
        threading.Thread(target=self._run, name="tllm-turns", daemon=True).start()

    def ask(self, order: RolloutOrder) -> AskedTurns:
        """Let these completions be sampled with the weights that were published last."""
        asked = AskedTurns(order, self._rollouts.fixed())
        self._waiting.put(asked)
        return asked

    def take_up(self, order: RolloutOrder, completions: Sequence[Completion]) -> None:
        """Bring the environments of completions that a save holds to where they were."""
        play_again(order, completions, self._tools)

    def close(self) -> None:
        """End the thread, once what it waits for has ended."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (asked := self._waiting.get()) is not None:
            asked.sample(self._tools, self._sampling)


class AskedTurns:
    """Completions of several turns that were asked for. `metrics` are there when these are."""

    def __init__(self, order: RolloutOrder, weights: FixedWeights) -> None:
        self._order, self._weights = order, weights
        self._found: Future[list[Completion]] = Future()
        self.metrics: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to be waited for."""
        return self._found.done()

    def wait(self, still: Still = nobody) -> list[Completion]:
        """The completions, of all turns each. ConfigError for servers that cannot sample, and for a tool."""
        while not wait([self._found], LOOK_SECONDS).done:
            still()
        return self._found.result()

    def sample(self, tools: Tools, sampling: CompletionSampling) -> None:
        """Called once, by the thread that samples."""
        with told_of_errors(self._found):
            try:
                self._found.set_result(self._sampled(tools, sampling))
            finally:
                self._weights.release()

    def _sampled(self, tools: Tools, sampling: CompletionSampling) -> list[Completion]:
        turns: StepTurns | None = None
        later = self._order
        while any(later.groups):
            going = sampling._replace(goes_on=turns is not None)
            asked = self._weights.ask(groups_of(later), later.stop_ids, going)
            found = asked.wait()
            self.metrics = {name: value + self.metrics.get(name, 0.0) for name, value in asked.metrics.items()}
            if turns is None:
                turns = StepTurns(self._order, found, tools, sampling.max_tokens)
            else:
                turns.take(found)
            later = turns.next()
        return [] if turns is None else turns.completions()
