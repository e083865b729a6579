"""The coordinator's own code with simulated nodes in virtual time: that it forms, recovers and grows again, and that
what it sends grows as its laws say."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks.cluster.coordinator_scale import exponent
from benchmarks.cluster.simulated_nodes import Machines
from benchmarks.cluster.simulated_run import Cost, SimulatedRun
from benchmarks.emulation.virtual_loop import VirtualLoop, run_virtually
from tllm.cluster import heartbeat
from tllm.cluster.connection import Address
from tllm.node.coordinator.membership import ProbeResult


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(3600):  # of virtual time
            await scene()

    run_virtually(VirtualLoop(), limited())


def test_an_hour_passes_at_once_and_in_order() -> None:
    told: list[float] = []

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        for seconds in (3000.0, 2.0, 60.0):
            loop.call_later(seconds, lambda: told.append(loop.time()))
        await asyncio.sleep(3500)
        assert loop.time() == pytest.approx(3500)

    began = time.monotonic()
    play(scene)
    assert told == pytest.approx([2.0, 60.0, 3000.0])
    assert time.monotonic() - began < 60


def test_where_nothing_is_to_come_nobody_waits_for_ever() -> None:
    async def scene() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="after 0 s everything waits"):
        run_virtually(VirtualLoop(), scene())


def test_a_run_forms_loses_nodes_goes_on_with_fewer_and_grows_again(tmp_path: Path) -> None:
    async def scene() -> None:
        run = SimulatedRun(48, tmp_path)
        formed = await run.form(within=5.0)
        whole, state = run.coordinator.work.plan, run.coordinator.state
        assert (state.epoch, state.is_ready, state.plan, state.seated_count) == (1, True, whole, 48)
        assert formed.messages == 48 * (2 + 9) + 1, "two to attach, nine of an epoch, and the run's first news"
        killed = await run.lose(is_silent=False)
        assert run.coordinator.state.plan.dp == (1, 1) and killed.seconds < 30  # type: ignore[union-attr]
        silent = await run.lose(is_silent=True)
        assert silent.seconds - killed.seconds > 4, "five seconds of silence and a probe come before"
        restored = await run.restore(2)
        assert run.coordinator.state.plan == whole and run.coordinator.state.is_ready
        pause = killed.seconds - 0.5  # of which a part is what came before the next epoch began
        assert restored.seconds > 32 / 16 * 0.8 * pause, "16 more of 32 are worth a pause when it is as long ago twice"
        assert run.run.recovery.lost_ranks == 2
        steps = run.cluster.step
        await run.stay(10.0)
        assert run.cluster.step > steps, "the run takes steps again"
        await run.end()

    play(scene)


def test_messages_of_an_epoch_grow_with_the_nodes_and_their_bytes_after_a_loss_as_well(tmp_path: Path) -> None:
    rows: list[dict[str, dict[str, float] | float]] = []

    async def scene(ranks: int) -> None:
        run = SimulatedRun(ranks, tmp_path, Machines(stragglers=0.0))
        formed, killed = await run.form(within=2.0), await run.lose(is_silent=False)
        rows.append({"ranks": ranks, "form": vars(formed), "killed": vars(killed)})
        await run.end()

    for ranks in (96, 192):
        play(lambda ranks=ranks: scene(ranks))  # type: ignore[misc]
    assert exponent(rows, "form", "messages", smallest=1) == pytest.approx(1.0, abs=0.01)
    assert exponent(rows, "killed", "messages", smallest=1) == pytest.approx(1.0, abs=0.02)
    assert exponent(rows, "killed", "nbytes", smallest=1) == pytest.approx(1.0, abs=0.05)
    assert exponent(rows, "form", "nbytes", smallest=1) < 1.9, (
        "tables are packed once, and small beside the settings so far"
    )
    assert exponent(rows, "killed", "seconds", smallest=1) < 0.3


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    seen: list[Cost] = []

    async def scene() -> None:
        run = SimulatedRun(32, tmp_path, seed=5)
        await run.form(within=3.0)
        seen.append(await run.lose(is_silent=True))
        await run.end()

    for _ in range(2):
        play(scene)
    first, second = ((one.seconds, one.messages, one.nbytes, one.beats) for one in seen)
    assert first == second


def test_nodes_of_which_some_die_and_knock_again_compute_on(tmp_path: Path) -> None:
    async def scene() -> None:
        run = SimulatedRun(96, tmp_path)
        await run.form(within=5.0)
        churn = await run.churn(200.0, every=40.0, back_after=20.0)
        assert churn.deaths == len(churn.recoveries) >= 4 and churn.returned == churn.deaths
        assert churn.refused >= 1, "a silent node came back before it was missed"
        assert 0.1 < churn.computing < 1 and max(churn.recoveries) < 60
        assert churn.cost.messages < 12 * 96 * (churn.epochs + 1)
        assert churn.epochs <= churn.deaths + 1, "who comes back is taken in with a loss, and stops nobody"
        await run.stay(120.0)
        assert run.coordinator.state.plan == run.coordinator.work.plan and run.coordinator.state.is_ready
        assert run.coordinator.state.living_count == 96, "all are back"
        await run.end()

    play(scene)


def test_nodes_beyond_those_at_once_beat_less_often_and_are_missed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "NODES_AT_ONCE", 8)
    beats: dict[int, int] = {}

    async def held_up(_: Address) -> ProbeResult:
        return ProbeResult("its machine answers", True)

    async def scene(ranks: int) -> None:
        run = SimulatedRun(ranks, tmp_path, Machines(stragglers=0.0))
        await run.form(within=2.0)
        beats[ranks] = (await run.stay(60.0)).beats
        interval, members = run.coordinator.members.interval, run.coordinator.members
        assert (interval.asked_after, interval.lost_after) == {16: (5.0, 5.0), 48: (6.0, 12.0)}[ranks]
        for limit in (interval.asked_after, interval.lost_after):
            silent = await run.lose(is_silent=True)
            assert limit - 3.0 < silent.seconds < limit + 3.0 + 6.0
            members.surroundings = members.surroundings._replace(why_silent=held_up)
        await run.end()

    for ranks in (16, 48):
        play(lambda ranks=ranks: scene(ranks))  # type: ignore[misc]
    assert beats[48] == pytest.approx(beats[16], rel=0.05), "as many heartbeats, of three times as many nodes"


@pytest.mark.soak
@pytest.mark.timeout(3600)  # two minutes of a fast processor, of which others may leave it a tenth
def test_10_000_nodes_form_and_go_on_after_a_loss_with_ten_messages_a_node(tmp_path: Path) -> None:
    async def scene() -> None:
        run = SimulatedRun(10_000, tmp_path)
        formed = await run.form(within=10.0)
        assert formed.messages == 10_000 * 11 + 1 and formed.seconds < 60
        for is_silent in (False, True):
            lost = await run.lose(is_silent=is_silent)
            assert lost.seconds < 60 and lost.messages < 11 * 10_000
            assert lost.processor < 300, "not quadratic: some ten seconds on an idle processor"
        await run.end()

    play(scene)
