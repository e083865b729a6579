"""How the interruptions of a run are counted, without any node."""

from __future__ import annotations

from tllm.node.train.run_progress import IN_VAIN, RunProgress
from tllm.training.report.events import RunBegan


def test_interruptions_count_until_a_step_that_is_new() -> None:
    progress = RunProgress(done=0)
    progress.began(RunBegan(0, 1, 1.0))
    progress.stepped(1)
    for count in range(1, IN_VAIN + 1):
        progress.interrupt()
        progress.interrupt()  # another loss before the run goes on
        assert progress.interruptions == count and not progress.is_in_vain
        assert progress.resume() >= 0
        progress.began(RunBegan(0, 1, 1.0, origin="memory"))
        progress.stepped(1)  # again
    progress.interrupt()
    assert progress.is_in_vain
    progress.resume()
    progress.stepped(2)
    assert progress.interruptions == 0


def test_a_move_is_no_interruption_and_its_pause_is_timed() -> None:
    progress = RunProgress(done=0)
    assert progress.resume() == 0.0, "nothing was interrupted"
    progress.pause()
    progress.interrupt()
    assert progress.interruptions == 0 and progress.resume() > 0


def test_a_run_that_was_done_before_is_resumed() -> None:
    assert not RunProgress(done=0).is_resumed(RunBegan(0, 1, 1.0))
    assert not RunProgress(done=7).is_resumed(RunBegan(7, 1, 1.0, origin="save")), "nothing is done again"
    assert RunProgress(done=7).is_resumed(RunBegan(6, 1, 1.0, origin="save"))
    assert RunProgress(done=0).is_resumed(RunBegan(3, 1, 1.0, origin="memory"))
