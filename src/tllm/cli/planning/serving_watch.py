"""`ServingWatch`: watches a server whose plan was predicted, says what another plan would gain, and may move to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tllm.cli.planning.outcome import serving_outcome
from tllm.cli.planning.plan_advice import changes
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.core.errors import CapacityError, PlanError
from tllm.core.tasks import background, end_tasks
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.search.drift import Slowdown, slowed_survey
from tllm.planner.search.serving_drift import ServingDriftDetector, decode_totals, lone_step_totals, serving_gain
from tllm.planner.search.serving_search import ServingChoice
from tllm.planner.simulate.serving import predict_serving
from tllm.server.latency import TimedEngine

if TYPE_CHECKING:
    from tllm.node.serve.serving import Serving


log = logging.getLogger("tllm.serve")

LOOK_SECONDS = 1.0
"""From one look at how fast ranks are to the next: their heartbeats say it."""

QUIET_LOOKS = 60
"""Looks between one advice and the next, and so between moves."""

COMPARED_LOOKS = 10
"""Looks between one comparison of predictions with what is measured and the next."""

WORTH = 0.10
"""The smallest gain that is worth an advice: a move costs a pause."""


class ServingWatch:
    """`moves`: whether to move to a plan that becomes faster; requests that are being answered go on."""

    def __init__(self, chooser: ServingChooser, serving: Serving, timed: TimedEngine, moves: bool) -> None:
        self._chooser, self._serving, self._timed, self._moves = chooser, serving, timed, moves
        self._epoch = -1
        self._since, self._looks = QUIET_LOOKS, 0
        self._drift: ServingDriftDetector | None = None
        self._before: ServingChoice | None = None  # what it last moved from

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look every second while the block goes on."""
        await self.look()
        watching = background(self._run(), "the search for a better plan")
        try:
            yield
        finally:
            await end_tasks(watching)

    @property
    def is_planned(self) -> bool:
        """Whether the present plan is one that was predicted."""
        return self._drift is not None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Compare how fast ranks are with how fast they were, and advise if that changed."""
        state = self._serving.state
        self._since += 1
        if not self._serving.is_open or not state.is_ready:
            return
        if state.epoch != self._epoch:
            self._begin(state.epoch, str(state.plan))
        if self._drift is None:
            return
        self._looks += 1
        if self._looks % COMPARED_LOOKS == 0:
            self._compare()
        beats = [member.beat.stats for member in state.ranks]
        self._drift.record_totals([decode_totals(beat) for beat in beats], lone_step_totals(beats[0]))
        drift = self._drift.new_slowdown() if self._since >= QUIET_LOOKS else None
        if drift is not None:
            await self._advise(drift, state.epoch)

    def _begin(self, epoch: int, plan: str) -> None:
        """Begin to watch a new epoch. Its plan is the chosen one, the one moved to, or the one gone back to after a
        move that failed; or it lacks nodes, and then nothing was predicted for it."""
        failed, before, self._before = self._chooser.chosen, self._before, None
        assert failed is not None and self._chooser.survey is not None, "a plan was predicted"
        cluster = cluster_of(self._chooser.survey, self._chooser.spec)
        if before is not None and plan == str(before.plan) != str(failed.plan):
            self._chooser.refused.add(str(failed.plan))
            predicted = predict_serving(self._chooser.spec, before.plan, cluster, before.devices, self._chooser.facts)
            self._chooser.chosen = replace(before, predicted=predicted)
        chosen, self._epoch = self._chooser.chosen, epoch
        self._timed.times.clear()
        self._timed.pooled.clear()
        self._serving.advice, self._serving.gain = "", 0.0
        if chosen is not None and str(chosen.plan) == plan:
            self._drift = ServingDriftDetector(self._chooser.spec, chosen, cluster, self._chooser.facts)
            self._serving.predicted = chosen.predicted.shown(self._chooser.facts)
        else:
            self._drift = self._serving.predicted = None

    def _compare(self) -> None:
        """Predict for requests like those that were served, and keep both for whoever asks."""
        outcome = serving_outcome(self._chooser, self._timed, None)
        if outcome is not None and self._serving.predicted is not None:
            self._serving.predicted = {**self._serving.predicted, "beside": msgspec.to_builtins(outcome)}

    async def _advise(self, drift: Slowdown, epoch: int) -> None:
        chosen, survey, chooser = self._chooser.chosen, self._chooser.survey, self._chooser
        assert chosen is not None and survey is not None, "a plan was predicted"
        gain = partial(serving_gain, chooser.spec, chosen, survey, drift, chooser.facts, chooser.best)
        try:
            share, other = await asyncio.to_thread(gain)
        except (CapacityError, PlanError) as error:
            log.warning("no other plan is found for machines as they are now: %s", error.message)
            return
        names = [node.node for node in survey.nodes]
        found = ", ".join(changes(drift, [names[device] for device in chosen.devices]))
        if share < WORTH:
            self._serving.advice, self._serving.gain = f"{found}: no other plan would be much faster", 0.0
            log.info("%s", self._serving.advice)
        else:
            self._since = 0
            on = " ".join(names[device] for device in other.devices)
            self._serving.gain = share
            self._serving.advice = f"{found}: plan {other.plan} on {on} would be {100 * share:.0f} % faster"
            log.warning("%s", self._serving.advice)
        if share >= WORTH and self._moves and self._serving.is_open and self._serving.state.epoch == epoch:
            self._move(other, slowed_survey(survey, chosen.devices, drift), [names[device] for device in other.devices])

    def _move(self, other: ServingChoice, now: Survey, nodes: list[str]) -> None:
        try:
            self._serving.move(other.plan, nodes)
        except (CapacityError, PlanError) as error:
            log.warning("does not move to it: %s", error.message)
            self._chooser.refused.add(str(other.plan))
            return
        self._before = self._chooser.chosen
        self._chooser.chosen, self._chooser.survey = other, now
        log.warning("moves to it; streams go on")
