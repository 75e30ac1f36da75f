"""Copies of hot blocks that the conductor has ordered: checks the order, and reads the blocks for the core."""

import itertools
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from moonpool.cluster.instances import check_instance
from moonpool.errors import InvalidRequest, MoonpoolError
from moonpool.kv.keys import unpack_keys
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from services.prefill.core.actions import CopyBlocks
from services.prefill.core.events import CopyIn, LoadEnded, Source
from services.prefill.loading import BlockRead, Loading
from services.prefill.requests import SOURCES, name_of

log = get_logger(__name__)

MAX_BLOCKS = 1 << 15
"""Keys of one order at most."""


class Copying:
    """Takes the orders, and does what the core makes of them.

    Args:
        loading: reads blocks.
        ask: tells the core; raises what that meets.
    """

    def __init__(self, loading: Loading, ask: Callable[[CopyIn], None]) -> None:
        self._loading = loading
        self._ask = ask
        self._numbers = itertools.count(1)
        self._orders: dict[int, tuple[CopyIn, kv_pb2.Instance]] = {}

    def order(self, message: conductor_pb2.ReplicateOrder) -> None:
        """Takes an order; one that is wrong is logged."""
        try:
            keys = unpack_keys(message.keys, max_keys=MAX_BLOCKS)
            check_instance(message.source, "source")
            if message.source.kind not in SOURCES:
                raise InvalidRequest("source.kind", "must be kvstore, prefill or decode")
        except MoonpoolError as error:
            log.warning("order to copy blocks refused", error=str(error))
            return
        number, peer = next(self._numbers), message.source.kind != kv_pb2.INSTANCE_KIND_KVSTORE
        event = CopyIn(number, tuple(keys), Source(name_of(message.source), len(keys), peer), message.tenant)
        self._orders[number] = event, message.source
        try:
            self._ask(event)
        except Exception:  # a defect costs the copy, not the instance
            log.exception("an order to copy blocks cannot be carried out", source=message.source.id)
            self.ended(number)

    def work(self, action: CopyBlocks) -> Callable[[], Coroutine[Any, Any, LoadEnded]]:
        """Reads the blocks."""
        event, source = self._orders[action.number]
        keys = event.keys[action.first :]
        read = BlockRead(source, keys, action.blocks, action.timeout_s, event.tenant, f"copy {action.number}")
        return partial(self._read, read)

    async def _read(self, read: BlockRead) -> LoadEnded:
        try:
            return await self._loading.load(read, _nothing_waits)
        except Exception:  # a defect costs the copy, not the instance
            log.exception("a copy failed", source=read.source.id)
            return LoadEnded(0, failed=True)

    def ended(self, number: int) -> None:
        """A copy is over."""
        self._orders.pop(number, None)


def _nothing_waits(_: int) -> None:
    """Nobody waits for single layers of a copy."""
