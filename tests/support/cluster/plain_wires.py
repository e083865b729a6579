"""A run whose ranks are threads of this process and whose links are plain TCP: what the wires would show without TLS.

    python -m tests.support.cluster.plain_wires serve MODEL PLAN PROMPT TOKENS FILE
    python -m tests.support.cluster.plain_wires train JOB PLAN FOLDER FILE

FILE gets runs of the bytes of every message that was sent, as msgpack by kind; of `serve` stdout gets the reply.
"""

from __future__ import annotations

import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch

from tests.support.cluster.packet_capture import windows
from tests.support.training.runs import train
from tllm.comm.links.frame import is_plain, memory_of
from tllm.comm.links.link import DEADLINE
from tllm.comm.links.send_buffer import PendingSend
from tllm.comm.links.tcp_link import TcpLink, set_socket_options
from tllm.engine.engine import Engine
from tllm.spec.request import SamplingParams
from tllm.text.tokenizer import Tokenizer
from tllm.training.job.job_file import read_job

Runs = dict[str, list[bytes]]
"""Runs of bytes by the kind of what they were part of."""


class PlainLink:
    """Both ends of a link, as a `LocalLink` is: the rank that sends uses the one, the rank that receives the other."""

    def __init__(self, sent: Runs, source: int, target: int, deadline: float = DEADLINE) -> None:
        self.source, self.target = source, target
        here, there = _connection()
        self._sent = sent
        self._out = TcpLink(here, source, target, deadline=deadline)
        self._in = TcpLink(there, source, target, deadline=deadline)
        self._closed = 0

    @property
    def bytes_moved(self) -> int:
        return self._out.bytes_moved

    def send(self, tensor: torch.Tensor) -> None:
        self._keep(tensor)
        self._out.send(tensor)

    def start_send(self, tensor: torch.Tensor) -> PendingSend | None:
        self._keep(tensor)
        return self._out.start_send(tensor)

    def send_bytes(self, payload: bytes) -> None:
        self._sent["messages"] += windows(payload, 64, 1)
        self._out.send_bytes(payload)

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
        pending_sends: Sequence[PendingSend] = (),
    ) -> torch.Tensor:
        return self._in.recv(shape, dtype, out, pending_sends)

    def recv_bytes(self, limit: int) -> bytes:
        return self._in.recv_bytes(limit)

    def wait(self, seconds: float) -> bool:
        return self._in.wait(seconds)

    @property
    def is_over(self) -> bool:
        return self._in.is_over

    def set_deadline(self, seconds: float) -> None:
        self._out.set_deadline(seconds)
        self._in.set_deadline(seconds)

    def unbounded(self) -> None:
        self._out.unbounded()

    def interrupt(self) -> None:
        self._out.interrupt()
        self._in.interrupt()

    def close(self) -> None:
        """Each rank closes it once; what one has sent must still reach the other."""
        self._closed += 1
        if self._closed == 2:
            self._out.close()
            self._in.close()

    def _keep(self, tensor: torch.Tensor) -> None:
        plain = tensor if is_plain(tensor) else tensor.detach().cpu().contiguous()
        self._sent[str(tensor.dtype)] += windows(bytes(memory_of(plain)))


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        there, _ = listening.accept()
    for sock in (here, there):
        set_socket_options(sock)
    return here, there


def serve(sent: Runs, folder: str, plan: str, prompt: str, tokens: str) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    greedy = SamplingParams(max_tokens=int(tokens), temperature=0, ignore_eos=True)
    with patch("tllm.engine.assembly.LocalLink", partial(PlainLink, sent)), Engine.load(folder, plan) as engine:
        (ids,) = engine.generate([tokenizer.encode(prompt)], greedy)
    print(tokenizer.decode(ids), end="")


def learn(sent: Runs, job: str, plan: str, folder: str) -> None:
    with patch("tests.support.training.local_links.LocalLink", partial(PlainLink, sent)):
        train(replace(read_job(Path(job)).job, output_dir=folder), plan)


def main() -> None:
    what, *words, file = sys.argv[1:]
    torch.set_num_threads(1)
    sent: Runs = defaultdict(list)
    (serve if what == "serve" else learn)(sent, *words)
    Path(file).write_bytes(msgspec.msgpack.encode(sent))


if __name__ == "__main__":
    main()
