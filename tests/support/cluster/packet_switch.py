"""A switch in user space: takes packets from one TUN device in each namespace and gives them to the one they are for,
`delay_ms` later, losing a part of them.  `python relay.py DELAY_MS LOSS NAMESPACE=ADDRESS …`

A line on stdin is another delay from then on.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000


def open_tun(namespace: str) -> int:
    """The file descriptor of `eth0` in a namespace; this process stays there until the next call moves it on."""
    with open(f"/run/netns/{namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return descriptor


def main() -> None:
    delay, loss = float(sys.argv[1]) / 1000, float(sys.argv[2])
    ports = {}
    for pair in sys.argv[3:]:
        namespace, address = pair.split("=")
        ports[socket.inet_aton(address)] = open_tun(namespace)
    print("ready", flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    order, chance, stdin = 0, random.Random(0), [sys.stdin.fileno()]
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ports.values(), *stdin], [], [], pause)
        now = time.monotonic()
        if sys.stdin.fileno() in ready:
            ready.remove(sys.stdin.fileno())
            line = sys.stdin.readline()
            delay, stdin = (float(line) / 1000, stdin) if line else (delay, [])
        for descriptor in ready:
            packet = os.read(descriptor, 65536)
            target = ports.get(packet[16:20])
            if target is not None and packet[0] >> 4 == 4 and chance.random() >= loss:
                heapq.heappush(waiting, (now + delay, order, target, packet))
                order += 1
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            os.write(target, packet)


if __name__ == "__main__":
    main()
