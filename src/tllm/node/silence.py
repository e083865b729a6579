"""Why a node may be silent, from how its machine answers a connection to its data port."""

from __future__ import annotations

import asyncio

from tllm.cluster.wire import Address, spell

PROBE_SECONDS = 1.0


async def why_silent(address: Address, seconds: float = PROBE_SECONDS) -> str:
    """In words. A system takes connections even for a process that is stopped, and refuses them for one that ended."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return "its process has ended"
    except TimeoutError:
        return f"nothing answers at {spell(address)}: its machine is cut off, asleep or off"
    except OSError as error:
        return f"its machine cannot be reached ({error.strerror})"
    writer.transport.abort()
    return "its machine answers and its process does not: it is stopped, or starved of the processor"
