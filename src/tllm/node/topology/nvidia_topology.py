"""How the GPUs of a machine are connected, as `nvidia-smi topo -m` says it.

Its table has a row and a column for each GPU and network card, then columns for the processors and the NUMA node next
to a GPU. Columns are separated by tabs, but there are more tabs than columns after the affinities, so the parser counts
words.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from tllm.core.errors import ConfigError
from tllm.node.topology.machine_topology import GpuTopology
from tllm.node.topology.system_files import number, parse_cpu_list

COMMAND = ("nvidia-smi", "topo", "-m")
SECONDS = 20.0  # a driver that sleeps takes a few
SELF = "X"
LINK = re.compile(r"NV\d+|SYS|NODE|PHB|PXB|PIX|X")
UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")
AFFINITIES = "CPU Affinity"
HINT = "see what `nvidia-smi topo -m` prints on that machine"


def nvidia_topology() -> GpuTopology | None:
    """What nvidia-smi says; None where there is no such command. ConfigError where it fails, or says something else."""
    if shutil.which(COMMAND[0]) is None:
        return None
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"nvidia-smi gave no answer within {SECONDS:g} s", HINT) from error
    except OSError as error:
        raise ConfigError(f"nvidia-smi does not start: {error.strerror}", HINT) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise ConfigError(f"nvidia-smi ended with exit code {done.returncode}: {said or 'it said nothing'}", HINT)
    return parse_nvidia_topology(done.stdout)


def parse_nvidia_topology(text: str) -> GpuTopology:
    """Read the table. ConfigError, of one line, for a text that is none."""
    lines = [line for line in UNDERLINE.sub("", text).splitlines() if line.strip()]
    if not lines:
        raise ConfigError("nvidia-smi topo -m printed nothing", HINT)
    names = tuple(lines[0].partition(AFFINITIES)[0].split())
    if not names or names[0] != "GPU0" or len(set(names)) < len(names):
        raise ConfigError(f"nvidia-smi topo -m begins with {lines[0].strip()[:60]!r}, which names no GPUs", HINT)
    rows = {words[0]: words[1:] for words in map(str.split, lines[1 : len(names) + 1])}
    links = tuple(_links(name, names, rows.get(name, [])) for name in names)
    for a, name in enumerate(names):
        for b, other in enumerate(names[:a]):
            if links[a][b] != links[b][a]:
                raise ConfigError(
                    f"nvidia-smi topo -m says {links[a][b]} from {name} to {other}, and {links[b][a]} back", HINT
                )
    near = [_affinity(rows[name][len(names) :]) for name in names]
    return GpuTopology(names, links, tuple(node for _, node in near), tuple(cpus for cpus, _ in near))


def _links(name: str, names: tuple[str, ...], words: list[str]) -> tuple[str, ...]:
    """The row of one of the names: a link to each, and itself in its own column."""
    links = tuple(words[: len(names)])
    if len(links) < len(names):
        raise ConfigError(f"nvidia-smi topo -m has {len(links)} links of {name}, and {len(names)} columns", HINT)
    for other, link in zip(names, links, strict=True):
        if not LINK.fullmatch(link) or (link == SELF) != (name == other):
            raise ConfigError(f"nvidia-smi topo -m says {link!r} from {name} to {other}, which is no link", HINT)
    return links


def _affinity(words: list[str]) -> tuple[tuple[int, ...], int | None]:
    """(processors, NUMA node) next to a GPU, as far as the rest of its row says; where it spans nodes, no node."""
    try:
        cpus = parse_cpu_list(words[0]) if words else ()
    except ValueError:  # "N/A"
        return (), None
    return cpus, number(words[1]) if len(words) > 1 else None
