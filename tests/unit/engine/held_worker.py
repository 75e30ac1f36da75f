"""The real worker on a staged device one of whose copying streams, `HELD_STREAM` (up or down), stops in its first copy.

It says so with a byte to the FIFO `HELD_TOLD`, and goes no further. It does not warm up, which copies.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from moonpool.engine import warm_up, worker
from moonpool.engine.platforms import stage_platform
from moonpool.engine.platforms.registry import DeviceName
from moonpool.engine.platforms.staged import StagedDevice, StagedStream


class Held(StagedDevice):
    """See above."""

    def give(self, stream: StagedStream, work: Callable[[], None] | Any) -> None:
        held = self.load_stream if os.environ["HELD_STREAM"] == "up" else self.store_stream
        super().give(stream, hold if stream is held and callable(work) else work)


def hold() -> None:
    Path(os.environ["HELD_TOLD"]).write_bytes(b"h")
    threading.Event().wait()


def held_device(name: DeviceName) -> Held:
    return Held(name.number)


if __name__ == "__main__":
    nothing = mock.patch.object(warm_up, "warm_up")
    with nothing, mock.patch.object(stage_platform, "open_device", held_device):
        worker.main()
