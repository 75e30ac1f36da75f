"""Threads beside an event loop that has steps to dispatch."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import NamedTuple

LEAST_BYTES = 256 << 10
LEAST_TOKENS = 1 << 10


class Beside(NamedTuple):
    """Where work goes that would keep the loop from dispatching steps.

    Handing it over and hearing of its end costs the loop 30 to 40 us. What is smaller is done there (ADR 28).

    Attributes:
        executor: does the work; it may be several pieces at once.
        least_bytes: smaller payloads land on the loop.
        least_tokens: requests with fewer tokens are read on the loop.
    """

    executor: Executor
    least_bytes: int = LEAST_BYTES
    least_tokens: int = LEAST_TOKENS
