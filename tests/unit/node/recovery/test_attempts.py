"""How often an epoch is begun again before the work is given up."""

from __future__ import annotations

from tllm.node.recovery.recovery import ATTEMPTS, MOST_ATTEMPTS, _Attempts


def test_epochs_that_fail_by_themselves_are_given_up_soon() -> None:
    attempts = _Attempts()
    for _ in range(ATTEMPTS - 1):
        attempts.failed(set())
        assert not attempts.are_over
    attempts.failed(set())
    assert attempts.are_over


def test_a_node_that_is_lost_again_and_again_explains_one_of_them() -> None:
    attempts = _Attempts()
    for _ in range(ATTEMPTS):
        attempts.failed({"a"})
    assert not attempts.are_over
    attempts.failed({"a"})
    assert attempts.are_over


def test_other_nodes_that_are_lost_meanwhile_count_much_later() -> None:
    attempts = _Attempts()
    for number in range(MOST_ATTEMPTS - 1):
        attempts.failed({f"node-{number}"})
        assert not attempts.are_over
    attempts.failed({"one more"})
    assert attempts.are_over
