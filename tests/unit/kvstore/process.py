"""A kvstore as a process of its own, which is forked where fork servers are in use."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.base.fork_server import start_service
from moonpool.cli.stack import ServiceProcess

END_S = 60.0
LOOK_S = 0.01
"""Between two looks at what is waited for, while the store has the processor."""


class StoreProcess(ServiceProcess):
    """Starts a kvstore that writes what it logs to `log`."""

    def __init__(self, log: Path, *flags: str) -> None:
        arguments = ["--id", "kvstore-0", "--listen", "127.0.0.1:0", *flags]
        super().__init__("kvstore", "kvstore-0", arguments, log, launcher=start_service)

    async def end(self, number: signal.Signals) -> int:
        """Sends a signal; returns the exit status."""
        self.signal(number)
        return await asyncio.to_thread(self.wait, END_S)


@asynccontextmanager
async def running(log: Path, *flags: str) -> AsyncIterator[StoreProcess]:
    """A kvstore that is ready; it is killed at the end."""
    child = StoreProcess(log, *flags)
    try:
        await asyncio.to_thread(child.wait_ready, END_S)
        yield child
    finally:
        await child.end(signal.SIGKILL)
