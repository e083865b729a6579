"""All-reduce between processes of this machine, over our links (plain and TLS) and gloo, in one run.

    python benchmarks/collectives.py [--ranks 2] [--rounds 5] [--json FILE]

Prints a table of p10 and p50 microseconds of one float32 all-reduce as rank 0 sees it. The ways take turns, `--rounds`
times each, so that other work on the machine falls on all of them alike.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import multiprocessing
import os
import platform
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tllm.comm.connect import Listener, open_links
from tllm.comm.group import Group

SIZES = {"4 KiB": 4096, "8 KiB": 8192, "64 KiB": 65536, "1 MiB": 1 << 20}
WAYS = ("plain", "tls", "gloo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    times = measure(options.ranks, options.rounds)
    report = {
        "command": "python " + " ".join(sys.argv),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "ranks": options.ranks,
        "microseconds": {
            size: {way: {"p10": percentile(t, 10), "p50": percentile(t, 50)} for way, t in ways.items()}
            for size, ways in times.items()
        },
    }
    print(table(report))
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


def measure(ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of every all-reduce, by size and way."""
    ports = free_ports(2 * ranks + 1)
    with tempfile.TemporaryDirectory() as folder:
        write_certificates(Path(folder))
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        workers = [
            context.Process(target=run_rank, args=(rank, ranks, rounds, ports, folder, results))
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        times: dict[str, dict[str, list[float]]] = results.get()
        for worker in workers:
            worker.join()
    return times


def run_rank(rank: int, ranks: int, rounds: int, ports: list[int], folder: str, results: Any) -> None:
    plain = open_group(rank, ranks, ports[:ranks], None)
    tls = open_group(rank, ranks, ports[ranks : 2 * ranks], Path(folder))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[-1]}", rank=rank, world_size=ranks)
    reduce: dict[str, Callable[[torch.Tensor], Any]] = {
        "plain": plain.all_reduce,
        "tls": tls.all_reduce,
        "gloo": dist.all_reduce,
    }
    times: dict[str, dict[str, list[float]]] = {size: {way: [] for way in WAYS} for size in SIZES}
    for _ in range(rounds):
        for size, nbytes in SIZES.items():
            x = torch.ones(nbytes // 4)
            for way in WAYS:
                plain.barrier()
                times[size][way] += time_calls(
                    lambda f=reduce[way], x=x: f(x.fill_(1.0)), 400 if nbytes < 1 << 20 else 60
                )
                assert x[0] == ranks, f"{way} does not sum"
    if rank == 0:
        results.put(times)
    dist.barrier()
    plain.barrier()
    plain.close()
    tls.close()
    dist.destroy_process_group()


def time_calls(call: Callable[[], Any], count: int) -> list[float]:
    for _ in range(count // 10):
        call()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def open_group(rank: int, ranks: int, ports: list[int], folder: Path | None) -> Group:
    server = client = None
    if folder is not None:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(folder / "node.pem")
            context.load_verify_locations(folder / "ca.pem")
            context.verify_mode = ssl.CERT_REQUIRED
        server.num_tickets = 0
    listener = Listener("127.0.0.1", ports[rank], server)
    addresses = {peer: ("127.0.0.1", port) for peer, port in enumerate(ports)}
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    links = open_links(rank, addresses, listener, pairs, cluster="bench", epoch=1, context=client)
    listener.close()
    send = {b: link for (a, b), link in links.items() if a == rank}
    recv = {a: link for (a, b), link in links.items() if b == rank}
    return Group(rank, ranks, send, recv)


def write_certificates(folder: Path) -> None:
    """ca.pem, and node.pem signed by it with its key."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench CA")])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench node")])

    def signed(
        subject: x509.Name, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(ca_name).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical=False)
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        return builder.sign(ca_key, hashes.SHA256())

    ca = signed(ca_name, ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=0))
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    node = signed(name, key.public_key(), here)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "node.pem").write_bytes(node.public_bytes(pem) + secret)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def percentile(times: list[float], percent: int) -> float:
    return round(statistics.quantiles(times, n=100)[percent - 1], 1)


def table(report: dict[str, Any]) -> str:
    lines = [f"| all-reduce, {report['ranks']} ranks, us (p10 / p50) | " + " | ".join(WAYS) + " | gloo / tls at p50 |"]
    lines.append("|---" * (len(WAYS) + 2) + "|")
    for size, ways in report["microseconds"].items():
        cells = [f"{ways[way]['p10']:.0f} / {ways[way]['p50']:.0f}" for way in WAYS]
        lines.append(f"| {size} | " + " | ".join(cells) + f" | {ways['gloo']['p50'] / ways['tls']['p50']:.1f} |")
    return "\n".join(lines)


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "none"


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
