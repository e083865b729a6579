"""Whom a listener welcomes, by cluster, epoch and wire; without a socket."""

from __future__ import annotations

import pytest

from tllm.comm.links.handshake import LinkHello, LinkWelcome
from tllm.comm.links.listener import EpochLinks
from tllm.core.errors import LinkClosed
from tllm.spec.plan import Wire


def in_epoch_5() -> EpochLinks:
    links = EpochLinks()
    links.expect("test", 5, [Wire(0, 1)])
    return links


@pytest.mark.parametrize(
    ("hello", "answer"),
    [
        (LinkHello("test", 5, 0, 1), LinkWelcome()),
        (LinkHello("test", 6, 0, 1), LinkWelcome("epoch 6 has not begun here", again=True)),
        (LinkHello("other", 5, 0, 1), LinkWelcome("this is not cluster 'other'")),
        (LinkHello("test", 4, 0, 1), LinkWelcome("epoch 4 is over, epoch 5 runs")),
        (LinkHello("test", 5, 2, 1), LinkWelcome("no link from rank 2 to rank 1 is expected")),
        (LinkHello("test", 5, 0, 1, "dp"), LinkWelcome("no 'dp' link from rank 0 to rank 1 is expected")),
    ],
)
def test_a_source_is_welcome_in_its_epoch_only(hello: LinkHello, answer: LinkWelcome) -> None:
    assert in_epoch_5().answer(hello, patient=False) == answer


def test_before_the_first_epoch_everyone_is_to_try_again() -> None:
    assert EpochLinks().answer(LinkHello("test", 5, 0, 1), patient=False).again


def test_a_patient_answer_lets_the_unexpected_try_again() -> None:
    assert in_epoch_5().answer(LinkHello("test", 5, 2, 1), patient=True).again


def test_an_epoch_that_is_over_cannot_begin_again_and_ends_who_waits_for_it() -> None:
    links = in_epoch_5()
    over = links.expect("test", 5, [Wire(2, 1)])
    links.end_epochs_before("test", 6)
    assert over.is_set()
    with pytest.raises(LinkClosed, match="epoch 5 is over, epoch 6 runs"):
        links.expect("test", 5, [Wire(0, 1)])
    with pytest.raises(LinkClosed, match="the epoch was over before rank 0 had dialled rank 1"):
        links.wait_for(Wire(0, 1), 10.0, over, ("127.0.0.1", 0))


def test_an_epoch_that_was_over_before_the_first_one_began_here_does_not_begin() -> None:
    links = EpochLinks()
    links.end_epochs_before("test", 6)
    with pytest.raises(LinkClosed, match="epoch 5 is over, epoch 6 runs"):
        links.expect("test", 5, [Wire(0, 1)])
    links.expect("test", 6, [Wire(0, 1)])
    assert links.answer(LinkHello("test", 6, 0, 1), patient=False) == LinkWelcome()


def test_epochs_of_one_cluster_say_nothing_of_those_of_another() -> None:
    """Nodes that compute together beside the plan are a cluster of their own, whose one epoch is 1."""
    links = EpochLinks()
    links.end_epochs_before("test", 6)  # and the node was refused its part in it, so that none began
    over = links.expect("test/teacher/1", 1, [Wire(0, 1)])
    links.end_epochs_before("test", 7)
    assert over.is_set(), "it has a part in the plan now"
    with pytest.raises(LinkClosed, match="epoch 6 is over, epoch 7 runs"):
        links.expect("test", 6, [Wire(0, 1)])
