"""An error keeps its kind, words and hint across the control wire."""

from __future__ import annotations

import pytest

from tllm.cluster.remote_errors import KINDS, error_of, failure, refused
from tllm.core.errors import LinkError, TllmError


def tree(kind: type[TllmError]) -> list[type[TllmError]]:
    ours = [child for child in kind.__subclasses__() if child.__module__ == TllmError.__module__]
    return [kind, *(below for child in ours for below in tree(child))]


@pytest.mark.parametrize("kind", tree(TllmError))
def test_every_error_arrives_as_what_it_was(kind: type[TllmError]) -> None:
    expected = LinkError if issubclass(kind, LinkError) else kind  # which link error it was matters to nobody else
    for said in (refused(kind("went wrong", "mend it")), failure(kind("went wrong", "mend it"))):
        came = error_of(said, "node west")
        assert type(came) is expected
        assert (came.message, came.hint) == ("node west: went wrong", "mend it")
        assert came.exit_code == kind.exit_code


def test_a_fault_of_ours_is_told_by_its_type() -> None:
    came = error_of(failure(RuntimeError("out of luck")))
    assert type(came) is TllmError and came.message == "RuntimeError: out of luck"
    assert KINDS["run"] is TllmError


@pytest.mark.parametrize("peer", [None, 3])
def test_which_other_rank_a_failure_was_with_crosses_the_wire(peer: int | None) -> None:
    error = LinkError("no link")
    error.peer = peer
    assert error_of(refused(error)).peer == peer
