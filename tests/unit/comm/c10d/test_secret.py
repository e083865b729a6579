"""Whom ranks of a c10d group trust: those that know the secret, whatever the store says."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import format_address
from tllm.cluster.tls import data_server
from tllm.comm.c10d import rendezvous
from tllm.comm.c10d.rendezvous import ProcessGroupLinks, join_rendezvous
from tllm.comm.c10d.secret import (
    SECRET_LENGTH,
    listening_host,
    new_meeting_name,
    read_secret_file,
    secret_file,
    secret_from_environment,
)
from tllm.comm.collectives.algorithm_choice import MeasuredChoice
from tllm.comm.links.listener import Listener
from tllm.core.errors import AuthError, ConfigError, LinkError, LinkTimeout, TllmError

ONE, OTHER = "a" * SECRET_LENGTH, "b" * SECRET_LENGTH


def meeting_of(environments: list[Mapping[str, str]], store: dist.Store) -> list[object]:
    """What each rank, a thread with an environment of its own, meets, or what it fails with.

    The first to fail has failed by what the others are, and not by their end; it ends theirs, which would take them
    until the deadline.
    """
    listeners, meeting = list[Listener](), rendezvous.new_meeting_name()

    class Ended(Listener):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            listeners.append(self)

    def work(rank: int) -> object:
        try:
            return join_rendezvous(store, rank, range(len(environments)), "test", 20.0, environments[rank])
        except TllmError as error:
            for listener in listeners:
                listener.end_epochs_before(meeting, rendezvous.EPOCH + 1)
            return error

    with pytest.MonkeyPatch.context() as patches, ThreadPoolExecutor(len(environments)) as pool:
        patches.setattr(rendezvous, "Listener", Ended)
        patches.setattr(rendezvous, "new_meeting_name", lambda: meeting)
        return list(pool.map(work, range(len(environments))))


def close(found: list[object]) -> None:
    for one in found:
        if isinstance(one, ProcessGroupLinks):
            one.listener.close()
            for link in one.links.values():
                link.interrupt()
                with contextlib.suppress(LinkError):
                    link.close()


@pytest.mark.parametrize("environment", [{}, {"TLLM_SECRET": ONE}])
def test_ranks_that_share_a_secret_meet(environment: dict[str, str]) -> None:
    found = meeting_of([environment] * 3, dist.HashStore())
    assert all(isinstance(one, ProcessGroupLinks) for one in found), found
    close(found)


def test_between_machines_the_links_are_measured_and_on_one_they_are_not() -> None:
    for hosts, measured in ((("127.0.0.1", "127.0.0.2"), True), (("127.0.0.1", "127.0.0.1"), False)):
        found = meeting_of([{"TLLM_SECRET": ONE, "TLLM_HOST": host} for host in hosts], dist.HashStore())
        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(lambda one: one.group(), found))  # type: ignore[attr-defined]
        assert [isinstance(group.choice, MeasuredChoice) for group in groups] == [measured] * 2
        close(found)


def test_ranks_that_share_none_do_not() -> None:
    found = meeting_of([{"TLLM_SECRET": ONE}, {"TLLM_SECRET": OTHER}], dist.HashStore())
    assert all(isinstance(one, AuthError | LinkError) for one in found), found
    assert any(isinstance(one, AuthError) for one in found)
    close(found)


def test_a_rank_without_the_secret_of_rank_0_does_not_meet_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails before it has an address; rank 0's time, which goes on until then, is cut short here."""
    asked, refused = rendezvous._wait_for_key, threading.Event()

    def soon(store: dist.Store, key: str, rank: int, until: float) -> str:
        if key.endswith("/1"):
            assert refused.wait(20)
            until = time.monotonic() + 0.05
        return asked(store, key, rank, until)

    def fail(rank: int, environment: dict[str, str]) -> TllmError:
        with pytest.raises(TllmError) as caught:
            join_rendezvous(store, rank, [0, 1], "test", 20.0, environment)
        refused.set()
        return caught.value

    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_wait_for_key", soon)
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(fail, range(2), [{"TLLM_SECRET": ONE}, {}]))
    assert [type(error) for error in errors] == [LinkTimeout, AuthError], errors
    assert "rank 1 did not come to the store" in errors[0].message


def test_a_rank_that_never_comes_is_named_by_the_deadline() -> None:
    with pytest.raises(LinkTimeout, match=r"rank 1 did not come to the store within 0\.\d* s"):
        join_rendezvous(dist.HashStore(), 0, [0, 1], "test", 0.5, {})


def test_whoever_the_store_names_must_prove_that_it_is_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that gives rank 2's address as rank 1's: both know the secret, and still neither speaks for the other."""
    store = dist.HashStore()
    asked = rendezvous._wait_for_key

    def crossed(store: dist.Store, key: str, rank: int, until: float) -> str:
        given = {1: 2, 2: 1}.get(rank, rank) if threading.current_thread().name.endswith("_0") else rank
        return asked(store, f"{key.rpartition('/')[0]}/{given}" if key[-1].isdigit() else key, rank, until)

    monkeypatch.setattr(rendezvous, "_wait_for_key", crossed)
    found = meeting_of([{"TLLM_SECRET": ONE}] * 3, store)
    assert any(isinstance(one, AuthError) and "spoke for rank" in one.message for one in found), found
    close(found)


def test_a_listener_of_another_authority_is_not_spoken_to() -> None:
    """Whoever has the store may send a rank anywhere; it gets no further than the handshake."""
    store = dist.HashStore()
    identity = Authority.of_secret(b"not the same").identity("rank-0")
    listener = Listener("127.0.0.1", 0, data_server(identity))
    meeting = new_meeting_name()
    store.set(rendezvous.MEETING, meeting)
    store.set(f"{rendezvous.MEETING}/{meeting}/0", format_address(listener.address))
    with pytest.raises(AuthError, match=r"rank 0 at .* do not trust each other"):
        join_rendezvous(store, 1, [0, 1], "test", 20.0, {"TLLM_SECRET": ONE})
    listener.close()


@pytest.mark.parametrize("meeting", ["../../etc/passwd", "", "0" * 31, "G" * 32])
def test_a_store_cannot_make_a_rank_read_another_file(meeting: str) -> None:
    store = dist.HashStore()
    store.set(rendezvous.MEETING, meeting)
    with pytest.raises(AuthError, match="as the name of the ranks' meeting"):
        join_rendezvous(store, 1, [0, 1], "test", 20.0, {})


def test_a_secret_that_might_be_guessed_is_refused() -> None:
    assert secret_from_environment({}) is None
    assert secret_from_environment({"TLLM_SECRET": ONE}) == ONE.encode()
    with pytest.raises(AuthError, match="31 characters of at least 32"):
        secret_from_environment({"TLLM_SECRET": ONE[1:]})


def test_without_a_secret_nothing_but_loopback_is_listened_on() -> None:
    assert listening_host({}, "10.0.0.1", is_shared=False) == "127.0.0.1"
    assert listening_host({"TLLM_HOST": "::1"}, "", is_shared=False) == "::1"
    with pytest.raises(AuthError, match=r"TLLM_HOST is 10\.0\.0\.2, which others reach, and there is no secret"):
        listening_host({"TLLM_HOST": "10.0.0.2"}, "", is_shared=False)


def test_with_a_secret_it_is_the_interface_towards_the_store() -> None:
    assert listening_host({}, "127.0.0.1", is_shared=True) == "127.0.0.1"
    assert listening_host({}, "localhost", is_shared=True) == "127.0.0.1"
    assert listening_host({}, "", is_shared=True) == "127.0.0.1"
    assert listening_host({"TLLM_HOST": "10.0.0.2"}, "10.0.0.1", is_shared=True) == "10.0.0.2"
    with pytest.raises(ConfigError, match="where nobody can be reached"):
        listening_host({"TLLM_HOST": "0.0.0.0"}, "10.0.0.1", is_shared=True)


def test_a_machine_whose_own_name_is_loopback_listens_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has it, and torchrun gives the store by that name."""
    routes = {"here": "127.0.0.1", "192.0.2.1": "10.0.0.5"}

    def own_address(towards: tuple[str, int]) -> str:
        if towards[0] not in routes:
            raise ConfigError(f"no way to {towards[0]} from this machine")
        return routes[towards[0]]

    monkeypatch.setattr("tllm.comm.c10d.secret.own_address", own_address)
    assert listening_host({}, "here", is_shared=True) == "10.0.0.5"
    del routes["192.0.2.1"]
    assert listening_host({}, "here", is_shared=True) == "127.0.0.1"


def test_the_secret_of_one_machine_is_its_users_alone_and_does_not_stay(tmp_path: Path) -> None:
    folder, meeting = tmp_path / "secrets", new_meeting_name()
    with secret_file(meeting, folder) as secret:
        assert read_secret_file(meeting, folder) == secret and len(secret) == 32
        assert stat.S_IMODE((folder / meeting).stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(AuthError, match="rank 0 is not a process of this user on this machine"):
        read_secret_file(meeting, folder)
    folder.chmod(0o755)
    with pytest.raises(AuthError, match="not a folder of this user alone"):
        read_secret_file(meeting, folder)
    folder.rmdir()
    os.symlink(tmp_path, folder)
    with pytest.raises(AuthError, match="not a folder of this user alone"):
        read_secret_file(meeting, folder)


class Tap:
    """Stands between ranks and writes down all that passes: it listens where they think that others do."""

    def __init__(self) -> None:
        self.heard, self._lock = bytearray(), threading.Lock()
        self._sockets: list[socket.socket] = []

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def before(self, address: tuple[str, int]) -> tuple[str, int]:
        """An address that leads to `address`."""
        server = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(server)
        threading.Thread(target=self._serve, args=(server, address), daemon=True).start()
        return server.getsockname()[:2]

    def _serve(self, server: socket.socket, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._join(server.accept()[0], address)

    def _join(self, here: socket.socket, address: tuple[str, int]) -> None:
        there = socket.create_connection(address)
        self._sockets += [here, there]
        for source, target in ((here, there), (there, here)):
            threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                with self._lock:
                    self.heard += chunk
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("environment", [{}, {"TLLM_SECRET": ONE}])
def test_what_passes_between_ranks_cannot_be_read(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    tap, read = Tap(), rendezvous.parse_address
    monkeypatch.setattr(rendezvous, "parse_address", lambda text: tap.before(read(text)))
    found = meeting_of([environment] * 2, dist.HashStore())
    message = b"these words are not for others  "
    x = torch.frombuffer(bytearray(message * 64), dtype=torch.uint8)

    def work(one: object) -> None:
        assert isinstance(one, ProcessGroupLinks)
        got = one.group().all_gather(x, [tuple(x.shape)] * 2)
        assert torch.equal(got[0], x) and torch.equal(got[1], x)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, found))
    close(found)
    tap.close()
    assert len(tap.heard) > 4 * x.numel() / 2, "the tap hears both ways"
    assert message[:8] not in tap.heard and b"rank-1" not in tap.heard and b"tllm" not in tap.heard
