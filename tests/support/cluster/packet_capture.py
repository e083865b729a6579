"""All that crosses a network namespace: its packets, the TCP streams they carry, and what can be read in these."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple

import numpy as np

from tests.support.comm.namespaces import enter

ETH_P_ALL, ETH_IPV4, ETH_ARP, ETH_IPV6 = 0x0003, 0x0800, 0x0806, 0x86DD
ICMP_V6 = 58
SOL_PACKET, PACKET_STATISTICS, PACKET_IGNORE_OUTGOING = 263, 6, 23
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 512 << 20
"""For what comes while a busy machine runs everything else; no memory is taken until then."""

SYN = 2
CHANGE_CIPHER, HANDSHAKE, ENCRYPTED = 20, 22, 23
HEAD_BYTES = 8
"""By which a run of bytes is found before it is compared."""

CLEAR_BYTES = 2048
"""A hello and its answer are the only parts of TLS 1.3 that are not encrypted, and they are no longer than this."""


class Flow(NamedTuple):
    """One direction of a TCP connection."""

    source: tuple[str, int]
    target: tuple[str, int]


class Capture:
    """Every packet that arrives at any device of a namespace while the `with` lasts, each once; none is missed."""

    def __init__(self, namespace: str) -> None:
        self.packets: list[bytes] = []
        self._namespace = namespace
        self._begun, self._over = threading.Event(), threading.Event()
        self._lost = -1
        self._thread = threading.Thread(target=self._listen, name="capture", daemon=True)

    def __enter__(self) -> Capture:
        self._thread.start()
        assert self._begun.wait(60), f"cannot listen in {self._namespace}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        assert self._lost == 0, f"{self._lost} packets were missed"

    def streams(self) -> dict[Flow, bytes]:
        """What each connection carried, in order. AssertionError where a part of it was not seen."""
        return streams(self.packets)

    def _listen(self) -> None:
        enter(self._namespace)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as raw:
            raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
            raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
            raw.settimeout(0.1)
            self._begun.set()
            while (packet := self._next(raw)) is not None or not self._over.is_set():
                if packet is not None:
                    self.packets.append(packet)
            self._lost = struct.unpack("II", raw.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]

    def _next(self, raw: socket.socket) -> bytes | None:
        """A packet; None if none comes for a moment."""
        try:
            return raw.recv(1 << 18)
        except TimeoutError:
            return None


def streams(packets: Iterable[bytes]) -> dict[Flow, bytes]:
    """The connections in these packets, each from its beginning."""
    first: dict[Flow, int] = {}
    parts: dict[Flow, dict[int, bytes]] = defaultdict(dict)
    for packet in packets:
        if (segment := _segment(packet)) is None:
            continue
        flow, number, flags, payload = segment
        if flags & SYN:
            first[flow] = number + 1
        if payload:
            assert flow in first, f"the beginning of {flow} was not seen"
            place = (number - first[flow]) % 2**32
            parts[flow][place] = max(payload, parts[flow].get(place, b""), key=len)
    return {flow: _joined(flow, found) for flow, found in parts.items()}


def others(packets: Iterable[bytes]) -> list[bytes]:
    """Packets that are neither TCP nor what finds addresses (ARP and its like in IPv6)."""
    found = []
    for packet in packets:
        kind = int.from_bytes(packet[12:14], "big")
        if kind == ETH_ARP or (kind == ETH_IPV6 and (packet[20] == ICMP_V6 or packet[54] == ICMP_V6)):
            continue  # the second: behind a hop-by-hop header, whose first byte says what follows
        if _segment(packet) is None:
            found.append(packet)
    return found


def check_encrypted(stream: bytes) -> int:
    """How many TLS records of a stream are encrypted; AssertionError where it holds anything else, past the hello."""
    place, clear, count = 0, 0, 0
    while place < len(stream):
        head = stream[place : place + 5]
        assert head[1:2] == b"\x03", f"{head!r} at byte {place} is no TLS record"
        length = int.from_bytes(head[3:5].ljust(2, b"\0"), "big")
        assert length <= 16384 + 256, f"a TLS record of {length} bytes"
        if head[0] == ENCRYPTED:
            count += 1
        else:
            assert head[0] in (CHANGE_CIPHER, HANDSHAKE) and not count, f"a record of type {head[0]} after {count}"
            clear += length
        place += 5 + length
    assert clear <= CLEAR_BYTES, f"{clear} bytes of handshake in clear"
    return count


def windows(payload: bytes, size: int = 32, count: int = 4) -> list[bytes]:
    """Runs of bytes spread over a payload, those that may stand anywhere (of few different values) left out."""
    if len(payload) <= size:
        starts = [0]
    else:
        starts = [(len(payload) - size) * step // max(count - 1, 1) for step in range(count)]
    runs = (payload[start : start + size] for start in starts)
    return [run for run in runs if len(run) >= 12 and len(set(run)) >= 8]


def seen(needles: Mapping[str, Iterable[bytes]], hay: Iterable[bytes]) -> dict[str, int]:
    """How many of each kind's runs of bytes stand in the hay; kinds without any are left out.

    All are looked for in one pass: a thousand searches of what a cluster sends take half a minute.
    """
    of_kind = {kind: list(runs) for kind, runs in needles.items()}
    by_head, found = defaultdict[bytes, set[bytes]](set), set[bytes]()
    begins = np.zeros(2**16, dtype=bool)
    for run in itertools.chain(*of_kind.values()):
        assert len(run) >= HEAD_BYTES, f"{run!r} may stand anywhere"
        by_head[run[:HEAD_BYTES]].add(run)
        begins[int.from_bytes(run[:2], "little")] = True
    for part in hay:
        octets = np.frombuffer(part, dtype=np.uint8).astype(np.uint16)
        for place in np.flatnonzero(begins[octets[:-1] | octets[1:] << 8]).tolist():
            found |= {run for run in by_head.get(part[place : place + HEAD_BYTES], ()) if part.startswith(run, place)}
    counts = {kind: sum(run in found for run in runs) for kind, runs in of_kind.items()}
    return {kind: count for kind, count in counts.items() if count}


def _segment(packet: bytes) -> tuple[Flow, int, int, bytes] | None:
    """Flow, sequence number, flags and payload of a packet; None if it is not TCP over IPv4."""
    if int.from_bytes(packet[12:14], "big") != ETH_IPV4 or packet[23] != socket.IPPROTO_TCP:
        return None
    start = 14 + 4 * (packet[14] & 15)
    stop = 14 + int.from_bytes(packet[16:18], "big")
    source, target, number = struct.unpack_from(">HHI", packet, start)
    offset, flags = 4 * (packet[start + 12] >> 4), packet[start + 13]
    here, there = socket.inet_ntoa(packet[26:30]), socket.inet_ntoa(packet[30:34])
    return Flow((here, source), (there, target)), number, flags, packet[start + offset : stop]


def _joined(flow: Flow, parts: Mapping[int, bytes]) -> bytes:
    whole = bytearray()
    for place in sorted(parts):
        assert place <= len(whole), f"bytes {len(whole)} to {place} of {flow} were not seen"
        whole += parts[place][len(whole) - place :]
    return bytes(whole)
