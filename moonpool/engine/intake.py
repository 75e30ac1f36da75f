"""Reads the requests of an engine instance: long ones in a thread, because their tokens are checked and hashed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.engine.incoming import TOKEN_BYTES, IncomingRequest
from moonpool.errors import Overloaded, Unavailable
from moonpool.streams.lanes.beside import Beside
from moonpool.v1 import kv_pb2

MAX_READING = 1024


@dataclass(slots=True, eq=False)
class _Reading:
    """A request that is being read in a thread, and who has asked."""

    request_id: str
    who: str
    cancelled: bool = False


class Intake:
    """Requests that have come and are not known to the core yet.

    Args:
        read: checks a request, in any thread.
        beside: where long ones are read.
    """

    def __init__(self, read: Callable[[kv_pb2.SequenceSpec], IncomingRequest], beside: Beside) -> None:
        self._read = read
        self._beside = beside
        self._reading: set[_Reading] = set()

    async def read(self, spec: kv_pb2.SequenceSpec, who: str = "") -> IncomingRequest:
        """Checks a request of `who`. Others may come and go meanwhile: what was true before may not be so afterwards.

        Raises:
            InvalidRequest: naming the field at fault.
            Overloaded: too many are being read.
            Unavailable: it was cancelled meanwhile.
        """
        if len(spec.token_ids) < TOKEN_BYTES * self._beside.least_tokens:
            return self._read(spec)
        if len(self._reading) >= MAX_READING:
            raise Overloaded(f"{MAX_READING} requests are being read", reason="queue_full", retry_after_s=1.0)
        reading = _Reading(spec.request_id, who)
        self._reading.add(reading)
        try:
            incoming = await asyncio.get_running_loop().run_in_executor(self._beside.executor, self._read, spec)
        finally:
            self._reading.discard(reading)
        if reading.cancelled:
            raise Unavailable("it was cancelled while it was read")
        return incoming

    def cancel(self, request_id: str, who: str = "") -> bool:
        """Cancels what is being read under this id for `who`; whether there was anything."""
        found = [it for it in self._reading if (it.request_id, it.who) == (request_id, who)]
        for reading in found:
            reading.cancelled = True
        return bool(found)
