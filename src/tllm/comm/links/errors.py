"""The errors of links: one wording for every kind of link, always with both ranks."""

from __future__ import annotations

from tllm.cluster.connection import Address, format_address
from tllm.core.errors import FrameError, LinkClosed, LinkTimeout


def link_named(name: str) -> str:
    """A link in words, with the name of its wire if it has one."""
    return f"{name!r} link" if name else "link"


def nothing_sent(source: int, target: int, seconds: float, what: str) -> LinkTimeout:
    return LinkTimeout(
        f"rank {source} sent nothing to rank {target} within {seconds:g} s, which waited for {what}",
        f"see whether rank {source} runs; a slow link needs a longer deadline",
    )


def nothing_taken(source: int, target: int, seconds: float) -> LinkTimeout:
    return LinkTimeout(
        f"rank {target} did not take what rank {source} sent it within {seconds:g} s",
        f"see whether rank {target} runs; a slow link needs a longer deadline",
    )


def not_opened(source: int, target: int, name: str, seconds: float, address: Address) -> LinkTimeout:
    return LinkTimeout(
        f"rank {source} did not open its {link_named(name)} to rank {target} within {seconds:.3g} s",
        f"see whether rank {source} runs and reaches {format_address(address)}",
    )


def source_gone(source: int, target: int, what: str, why: str) -> LinkClosed:
    return LinkClosed(
        f"rank {source} went away while rank {target} waited for {what} from it ({why})",
        f"see the log of rank {source}",
    )


def target_gone(source: int, target: int, why: str) -> LinkClosed:
    return LinkClosed(
        f"rank {target} went away while rank {source} sent to it ({why})", f"see the log of rank {target}"
    )


def closed_here(source: int, target: int) -> LinkClosed:
    return LinkClosed(f"the link from rank {source} to rank {target} was closed on this side")


def refused_link(source: int, target: int, got: str, expected: str) -> FrameError:
    return FrameError(
        f"rank {source} sent rank {target} {got}; the plan says {expected}", "the link is closed; start both ranks anew"
    )
