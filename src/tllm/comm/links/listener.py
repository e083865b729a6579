"""The accepting side of links: `Listener` takes the connections that the plan expects and refuses every other one.

The handshake: TLS if there is a context, then the source's `LinkHello`, then the target's `LinkWelcome`.
`EpochLinks` decides whom to welcome; the listener owns sockets and threads.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tllm.comm.links.errors import link_named, not_opened
from tllm.comm.links.handshake import (
    LINK_HELLOS,
    LinkHello,
    LinkWelcome,
    peer_certificate,
    receive_message,
    send_message,
    start_tls,
)
from tllm.comm.links.link import DEADLINE
from tllm.comm.links.send_buffer import shut
from tllm.comm.links.tcp_link import TcpLink, set_socket_options
from tllm.core.errors import AuthError, ClusterError, FrameError, LinkClosed
from tllm.spec.plan import Wire

HALF_OPEN = 32
"""Connections that may be in their handshake at a time; more of them wait in the kernel's accept queue."""

HELLO_SECONDS = 3.0
"""For the whole handshake of one connection."""

Certificate = dict[str, Any]
"""As ssl.SSLSocket.getpeercert() gives it."""

Authorize = Callable[[LinkHello, Certificate | None], None]
"""authorize(hello, certificate of the other end): raises AuthError if it may not speak for the rank that it says."""

logger = logging.getLogger("tllm.comm")


class EpochLinks:
    """The wires to this process that the current epoch expects, and the connections that have arrived for them.

    Wires belong to one epoch of one cluster. A later epoch ends the one before: its connections are closed, and whoever
    waits for one is woken. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cluster, self._epoch = "", -1
        self._least_epoch: dict[str, int] = {}  # of each cluster; earlier ones are over
        self._over = threading.Event()  # set when the current epoch is over
        self._expected: set[Wire] = set()
        self._arrived: dict[Wire, socket.socket] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def expect(self, cluster: str, epoch: int, wires: Iterable[Wire]) -> threading.Event:
        """As `Listener.expect`."""
        with self._changed:
            if epoch < (least := self._least_epoch.get(cluster, 0)):
                raise LinkClosed(f"epoch {epoch} is over, epoch {least} runs")
            if (cluster, epoch) != (self._cluster, self._epoch):
                self._end_epoch()
                self._cluster, self._epoch, self._least_epoch[cluster] = cluster, epoch, epoch
                self._over = threading.Event()
            self._expected |= set(wires)
            return self._over

    def end_epochs_before(self, cluster: str, epoch: int) -> None:
        """As `Listener.end_epochs_before`."""
        with self._changed:
            self._least_epoch[cluster] = max(self._least_epoch.get(cluster, 0), epoch)
            if self._cluster != cluster or self._epoch < epoch:
                self._end_epoch()

    def answer(self, hello: LinkHello, patient: bool) -> LinkWelcome:
        """Whether the source of this wire is expected now; a patient answer tells one that is not to try again."""
        with self._changed:
            cluster, epoch = self._cluster, self._epoch
            wanted = hello.wire in self._expected
        if epoch < 0 or (hello.cluster == cluster and hello.epoch > epoch):
            return LinkWelcome(f"epoch {hello.epoch} has not begun here", again=True)
        if hello.cluster != cluster:
            # Nodes of one cluster that compute together beside its plan have a name under the cluster's.
            is_coming = hello.cluster.partition("/")[0] == cluster.partition("/")[0]
            return LinkWelcome(f"this is not cluster {hello.cluster!r}", again=is_coming)
        if hello.epoch != epoch:
            return LinkWelcome(f"epoch {hello.epoch} is over, epoch {epoch} runs")
        if not wanted:
            words = f"no {link_named(hello.name)} from rank {hello.source} to rank {hello.target} is expected"
            return LinkWelcome(words, again=patient)
        return LinkWelcome()

    def put(self, hello: LinkHello, sock: socket.socket) -> bool:
        """Keep a welcomed connection for `wait_for`; False if the epoch changed or another one came first."""
        with self._changed:
            current = (hello.cluster, hello.epoch) == (self._cluster, self._epoch)
            if self._closed or not current or hello.wire not in self._expected:
                return False
            self._expected.remove(hello.wire)
            self._arrived[hello.wire] = sock
            self._changed.notify_all()
            return True

    def wait_for(self, wire: Wire, seconds: float, over: threading.Event | None, address: tuple[str, int]) -> TcpLink:
        """As `Listener.accept`; `address` is the listener's own, for the error's hint."""
        source, target, name = wire
        with self._changed:
            over = over or self._over
            self._changed.wait_for(lambda: wire in self._arrived or self._closed or over.is_set(), seconds)
            if over.is_set():
                raise LinkClosed(f"the epoch was over before rank {source} had dialled rank {target}")
            if self._closed:
                raise LinkClosed(f"rank {target} stopped listening before rank {source} had dialled")
            if wire not in self._arrived:
                raise not_opened(source, target, name, seconds, address)
            return TcpLink(self._arrived.pop(wire), source, target, self._epoch)

    def is_ready(self, wire: Wire, seconds: float) -> bool:
        """As `Listener.is_ready`."""
        with self._changed:
            return self._changed.wait_for(lambda: wire in self._arrived or self._closed or self._over.is_set(), seconds)

    def close(self) -> None:
        """Expect nothing any more, and wake whoever waits."""
        with self._changed:
            self._closed = True
            self._drop()
            self._changed.notify_all()

    def _end_epoch(self) -> None:
        self._drop()
        self._over.set()
        self._changed.notify_all()

    def _drop(self) -> None:
        self._expected.clear()
        while self._arrived:
            self._arrived.popitem()[1].close()


class Listener:
    """Accepts links in a thread of its own; each handshake has another thread, so that a silent peer delays nobody.

    `context` is for TLS; without one links are plain TCP. `authorize(hello, certificate)` raises AuthError when this
    certificate may not speak for `hello.source`. A `patient` listener tells a source that is not expected to try again,
    since it may be expected in a moment. `refused` counts the connections that were turned away.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        authorize: Authorize | None = None,
        hello_seconds: float = HELLO_SECONDS,
        patient: bool = False,
    ) -> None:
        self.refused = 0
        self._refused_lock = threading.Lock()
        self._context = context
        self._authorize = authorize
        self._hello_seconds = hello_seconds
        self._patient = patient
        self._links = EpochLinks()
        self._half_open = threading.BoundedSemaphore(HALF_OPEN)
        self._socket = _listen(host, port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept_connections, name="link listener", daemon=True)
        self._thread.start()

    def expect(self, cluster: str, epoch: int, wires: Iterable[Wire]) -> threading.Event:
        """Welcome each of these wires once, in this epoch, and end an earlier epoch.

        The event is set when this epoch is over. LinkClosed if it is over already.
        """
        return self._links.expect(cluster, epoch, wires)

    def end_epochs_before(self, cluster: str, epoch: int) -> None:
        """Epochs before this one are over, though it has not begun here: their wires are expected no more, and no more
        are those of another cluster."""
        self._links.end_epochs_before(cluster, epoch)

    def accept(self, wire: Wire, seconds: float = DEADLINE, over: threading.Event | None = None) -> TcpLink:
        """The link of this wire, as soon as its source has dialled.

        LinkTimeout after `seconds`. LinkClosed when the event `over`, by default that of the current epoch, is set, or
        the listener is closed.
        """
        return self._links.wait_for(wire, seconds, over, self.address)

    def is_ready(self, wire: Wire, seconds: float) -> bool:
        """Whether, within `seconds`, `accept` of this wire has no more to wait for."""
        return self._links.is_ready(wire, seconds)

    def close(self) -> None:
        self._links.close()
        shut(self._socket)  # wakes the thread in accept()
        self._thread.join()
        self._socket.close()

    def _accept_connections(self) -> None:
        while True:
            self._half_open.acquire()
            try:
                sock, peer = self._socket.accept()
            except OSError:
                if self._links.is_closed:
                    return
                self._half_open.release()
                logger.exception("accepting a link failed")
                time.sleep(0.05)  # out of file descriptors: let some close
                continue
            hello = threading.Thread(target=self._shake_hands, args=(sock, peer[:2]), name="link hello", daemon=True)
            try:
                hello.start()
            except RuntimeError as error:  # this user, or this container, may have no more of them
                sock.close()
                self._half_open.release()
                self._refuse(peer[:2], f"no thread can be started for it: {error}")

    def _shake_hands(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        until = time.monotonic() + self._hello_seconds
        welcomed = False
        try:
            set_socket_options(sock)
            sock.settimeout(self._hello_seconds)
            if self._context is not None:
                sock = start_tls(sock, self._context)
            hello = receive_message(sock, LINK_HELLOS, until)
            answer = self._answer(hello, sock)
            if answer.refused and not answer.again:
                self._refuse(peer, answer.refused)
            send_message(sock, answer, until)  # before anyone else may use the socket
            welcomed = not answer.refused and self._links.put(hello, sock)
        except ssl.SSLEOFError:  # such as whoever only asks whether this machine answers
            self._refuse(peer, "it closed the connection during the handshake")
        except (OSError, FrameError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            self._refuse(peer, str(error))
        finally:
            if not welcomed:
                sock.close()
            self._half_open.release()

    def _answer(self, hello: LinkHello, sock: socket.socket) -> LinkWelcome:
        answer = self._links.answer(hello, self._patient)
        if answer.refused:
            return answer
        try:
            if self._authorize is not None:
                self._authorize(hello, peer_certificate(sock))
        except AuthError as error:
            return LinkWelcome(error.message)
        return answer

    def _refuse(self, peer: tuple[str, int], why: str) -> None:
        logger.warning("refused a link from %s:%d: %s", *peer, why)
        with self._refused_lock:
            self.refused += 1


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        hint = "give another port, or 0 for any free one"
        raise ClusterError(f"cannot listen on {host}:{port} for links: {error.strerror}", hint) from error
