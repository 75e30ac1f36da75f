"""A lane that is open: messages of one stream, each with its payload, over a socket and shared regions.

Payloads are sent from where they lie (outbound.py). Who receives one copies it into memory of its own before anything
looks at it (inbound.py): here, in one pass with the hash where it lands, or, where it is lent, whoever gets it. So what
is verified is what is used, whatever the peer writes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from moonpool.kv.scattered import Bytes
from moonpool.streams.lanes.brief import Brief
from moonpool.streams.lanes.faults import Breaker, breaker
from moonpool.streams.lanes.inbound import Came, Inbound, Taker
from moonpool.streams.lanes.landing import Landing
from moonpool.streams.lanes.outbound import Item, Outbound, Unsent
from moonpool.streams.lanes.regions import Mapped, OwnRegions, unmap
from moonpool.streams.lanes.sockets import LaneSocket
from moonpool.v1 import kv_pb2

M = TypeVar("M", bound=Message)


def _nowhere(message: Message, nbytes: int) -> None:
    """Payloads get memory of their own."""


class Lane(Generic[M]):
    """One open lane.

    Attributes:
        name: "local" or "tcp".
    """

    def __init__(
        self,
        name: str,
        sock: LaneSocket,
        cls: type[M],
        *,
        own: OwnRegions | None = None,
        readable: dict[int, Mapped] | None = None,
        mailbox: int | None = None,
        lent: tuple[int, Mapped] | None = None,
        acknowledge: Callable[[Message], None],
        breaks: Breaker | None = breaker,
    ) -> None:
        """Takes what has been agreed on.

        Args:
            name: Of its kind.
            sock: Connected; the lane closes it.
            cls: Messages that come.
            own: Where payloads may lie that this side sends from its own memory.
            readable: Regions in which the peer's payloads may lie.
            mailbox: Number of the one among them that this side has lent.
            lent: Number and memory of the region to which this side may write its payloads.
            acknowledge: Sends a message to the peer, in its turn.
            breaks: Breaks the lane on purpose.
        """
        self.name = name
        self._sock = sock
        self._regions = [*(readable or {}).values(), *((lent[1],) if lent else ())]
        self._out = Outbound(sock, own or OwnRegions(()), lent, lambda: self._in.take_pulls(), breaks)
        self._in: Inbound[M] = Inbound(
            sock,
            cls,
            readable or {},
            mailbox,
            self._out.pulled,
            lambda pulls: acknowledge(kv_pb2.LaneFrame(pulled=pulls)),
        )
        self._error: Exception | None = None

    @property
    def closed(self) -> bool:
        """It has ended."""
        return self._error is not None

    async def run(
        self,
        take: Callable[[M, Came], None],
        place: Callable[[M, int], Landing | None] = _nowhere,
        *,
        lend: bool = False,
        brief: Callable[[Brief, Bytes], int] | None = None,
    ) -> Exception:
        """Hands over what comes, in order, until the lane ends; returns why it has. To be called once at a time.

        Args:
            take: Gets each message with its payload, which is nobody else's; or where the payload has landed. Must not
                wait.
            place: Says where the payload of a message, of so many bytes, is to land; None for memory of its own.
            lend: Payloads that lie in regions and land nowhere are lent.
            brief: Gets brief messages, and tells how many bytes it has answered with; None where there are none.

        Raises:
            Exception: What `take` raised, or what `place` did that is no MoonpoolError.
        """
        if self._error is not None:
            return self._error
        return await self._in.run(Taker(take, place, lend, brief))

    def pause(self) -> None:
        """Hands over nothing until `resume`: what comes stays with the system."""
        self._in.pause()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._in.resume()

    def start(self, item: Item) -> Unsent | None:
        """Sends what an outbox gives, as far as the system takes it at once.

        Returns what is left, or what broke the lane. It must be given to `write` before anything else is sent.
        """
        unsent = self._out.start(item)
        if unsent is not None and unsent.error is not None and self._error is not None:
            self._out.fail(self._error)
        return unsent

    async def write(self, item: Item | Unsent) -> None:
        """Sends all of what an outbox gives, or of what `start` has left. Not to be cancelled.

        Raises:
            StreamBroken: The lane has ended.
        """
        unsent = item if isinstance(item, Unsent) else self.start(item)
        if unsent is None:
            return
        try:
            await self._out.finish(unsent)
        except BaseException:
            if self._error is not None:
                self._out.fail(self._error)
            raise

    def close(self, error: Exception) -> None:
        """Ends the lane; payloads that are still held fail with `error`. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._sock.close(error)
        self._in.end(error)
        self._out.fail(error)
        unmap(self._regions)
