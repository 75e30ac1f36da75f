"""Waits until an instance that drains has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from moonpool.client import Client

LOOK_S = 0.5
"""Seconds between two looks at the cluster's state."""


def drained(
    client: Client,
    instance_id: str,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether an instance has nothing that runs or waits, or has left, within `wait_s` seconds."""
    until = clock() + wait_s
    while True:
        state = client.cluster_state()
        found = next((instance for instance in state.instances if instance.id == instance_id), None)
        if found is None or (found.draining and not found.running and not found.waiting):
            return True
        if clock() >= until:
            return False
        pause(LOOK_S)
