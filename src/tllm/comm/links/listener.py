"""`Listener`: takes the connections that the plan expects, and refuses every other one within a second."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tllm.comm.links.errors import link_named, not_opened
from tllm.comm.links.handshake import LinkHello, LinkWelcome, hear, peer_certificate, say
from tllm.comm.links.link import DEADLINE
from tllm.comm.links.send_buffer import shut
from tllm.comm.links.tcp_link import TcpLink, tune
from tllm.core.errors import AuthError, ClusterError, FrameError, LinkClosed
from tllm.spec.plan import Wire

HALF_OPEN = 32  # connections that have not yet said a good hello; more of them wait to be accepted
HELLO_SECONDS = 3.0

Certificate = dict[str, Any]  # as ssl.SSLSocket.getpeercert() gives it
Authorize = Callable[[LinkHello, Certificate | None], None]

logger = logging.getLogger("tllm.comm")


class Listener:
    """Accepts links in a thread of its own; each says its hello in another, so that a silent one delays nobody.

    `authorize(hello, certificate)` raises AuthError when this certificate may not speak for `hello.source`. A `patient`
    one tells a source that is not expected to try again, since it may be in a moment.
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
        self._patient = patient
        self._context = context
        self._authorize = authorize
        self._hello_seconds = hello_seconds
        self._changed = threading.Condition()
        self._cluster, self._epoch = "", -1
        self._over, self._least = threading.Event(), 0
        self._expected: set[Wire] = set()
        self._arrived: dict[Wire, socket.socket] = {}
        self._half_open = threading.BoundedSemaphore(HALF_OPEN)
        self._closed = False
        self._socket = _listen(host, port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="link listener", daemon=True)
        self._thread.start()

    def expect(self, cluster: str, epoch: int, wires: Iterable[Wire]) -> threading.Event:
        """Welcome each of these once. A new epoch ends what the one before still expected, and whoever waits for it.

        The event is set when this epoch is over. LinkClosed for one that is over already.
        """
        with self._changed:
            if cluster == self._cluster and epoch < self._least:
                raise LinkClosed(f"epoch {epoch} is over, epoch {self._least} runs")
            if (cluster, epoch) != (self._cluster, self._epoch):
                self._end()
                self._cluster, self._epoch, self._least = cluster, epoch, epoch
                self._over = threading.Event()
            self._expected |= set(wires)
            return self._over

    def forget(self, epoch: int) -> None:
        """Epochs before this one are over, though it has not begun here: end what they still expected."""
        with self._changed:
            self._least = max(self._least, epoch)
            if self._epoch < epoch:
                self._end()

    def take(self, wire: Wire, seconds: float = DEADLINE, over: threading.Event | None = None) -> TcpLink:
        """The link of this wire, as soon as its source has dialled. LinkClosed when its epoch is `over`."""
        source, target, name = wire
        with self._changed:
            over = over or self._over
            self._changed.wait_for(lambda: wire in self._arrived or self._closed or over.is_set(), seconds)
            if over.is_set():
                raise LinkClosed(f"the epoch was over before rank {source} had dialled rank {target}")
            if self._closed:
                raise LinkClosed(f"rank {target} stopped listening before rank {source} had dialled")
            if wire not in self._arrived:
                raise not_opened(source, target, name, seconds, self.address)
            return TcpLink(self._arrived.pop(wire), source, target, self._epoch)

    def is_ready(self, wire: Wire, seconds: float) -> bool:
        """Whether `take` has no more to wait for, within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: wire in self._arrived or self._closed or self._over.is_set(), seconds)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._drop()
            self._changed.notify_all()
        shut(self._socket)  # wakes the thread in accept()
        self._thread.join()
        self._socket.close()

    def _end(self) -> None:
        self._drop()
        self._over.set()
        self._changed.notify_all()

    def _drop(self) -> None:
        self._expected.clear()
        while self._arrived:
            self._arrived.popitem()[1].close()

    def _accept(self) -> None:
        while True:
            self._half_open.acquire()
            try:
                sock, peer = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                self._half_open.release()
                logger.exception("accepting a link failed")
                time.sleep(0.05)  # out of file descriptors: let some close
                continue
            threading.Thread(target=self._greet, args=(sock, peer[:2]), name="link hello", daemon=True).start()

    def _greet(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        until = time.monotonic() + self._hello_seconds
        welcomed = False
        try:
            tune(sock)
            sock.settimeout(self._hello_seconds)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            hello = hear(sock, LinkHello, until)
            answer = self._judge(hello, sock)
            if answer.refused and not answer.again:
                self._refuse(peer, answer.refused)
            say(sock, answer, until)  # before anyone else may use the socket
            welcomed = not answer.refused and self._deliver(hello, sock)
        except (OSError, FrameError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            self._refuse(peer, str(error))
        finally:
            if not welcomed:
                sock.close()
            self._half_open.release()

    def _judge(self, hello: LinkHello, sock: socket.socket) -> LinkWelcome:
        with self._changed:
            cluster, epoch = self._cluster, self._epoch
            wanted = hello.wire in self._expected
        if epoch < 0 or (hello.cluster == cluster and hello.epoch > epoch):
            return LinkWelcome(f"epoch {hello.epoch} has not begun here", again=True)
        if hello.cluster != cluster:
            return LinkWelcome(f"this is not cluster {hello.cluster!r}")
        if hello.epoch != epoch:
            return LinkWelcome(f"epoch {hello.epoch} is over, epoch {epoch} runs")
        if not wanted:
            words = f"no {link_named(hello.name)} from rank {hello.source} to rank {hello.target} is expected"
            return LinkWelcome(words, again=self._patient)
        try:
            if self._authorize is not None:
                self._authorize(hello, peer_certificate(sock))
        except AuthError as error:
            return LinkWelcome(error.message)
        return LinkWelcome()

    def _deliver(self, hello: LinkHello, sock: socket.socket) -> bool:
        """Hand the connection over, unless the plan changed or another one came first meanwhile."""
        with self._changed:
            current = (hello.cluster, hello.epoch) == (self._cluster, self._epoch)
            if self._closed or not current or hello.wire not in self._expected:
                return False
            self._expected.remove(hello.wire)
            self._arrived[hello.wire] = sock
            self._changed.notify_all()
            return True

    def _refuse(self, peer: tuple[str, int], why: str) -> None:
        logger.warning("refused a link from %s:%d: %s", *peer, why)
        with self._changed:
            self.refused += 1


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        hint = "give another port, or 0 for any free one"
        raise ClusterError(f"cannot listen on {host}:{port} for links: {error.strerror}", hint) from error
