"""Payloads that are not copied twice: memory in which they land, and payloads that stay where they lie meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.kv.landing import land, verified
from moonpool.kv.scattered import Bytes
from moonpool.streams.lanes.beside import Beside


def _nowhere(writing: bool) -> None:
    """Nothing lands beside the loop."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Memory that takes a payload as it comes.

    Attributes:
        targets: the payload's slices go there, in order; together as long as it is.
        hashes: of each.
        live: asked before each write: whether the memory may still be written. What comes later is dropped.
        landed: to be called when all of the payload has come, whatever has become of it, with the number of leading
            targets that have their hash, and the defect that it has met, if any.
        beside: where it may land beside the loop; None: it lands on the loop.
        writing: told True before a thread begins to use the memory, and False once it does not any more, whatever has
            become of the stream meanwhile. The memory must stay as it is in between. What has landed is told later, and
            only while the stream lives.
    """

    targets: list[memoryview]
    hashes: Sequence[int]
    live: Callable[[], bool]
    landed: Callable[[int, Exception | None], None]
    beside: Beside | None = None
    writing: Callable[[bool], None] = _nowhere

    @property
    def nbytes(self) -> int:
        """Of the payload."""
        return sum([target.nbytes for target in self.targets])

    def take(self, data: Bytes | None, done: Callable[[Landed], None]) -> bool:
        """Copies a payload to where it belongs and verifies it there; None: it lies there, and is only verified.

        Returns:
            Whether `done` was called, which gets what has landed. If not it is called later, by the loop.
        """
        if self.beside is None or self.nbytes < self.beside.least_bytes:
            found = land(self.targets, data, self.hashes) if data is not None else verified(self.targets, self.hashes)
            done(Landed(self, found))
            return True
        loop = asyncio.get_running_loop()
        work = land.later(self.targets, data, self.hashes)

        def over(future: Future[int]) -> None:
            self.writing(False)
            error = future.exception()
            done(Landed(self, 0, error) if isinstance(error, Exception) else Landed(self, future.result()))

        self.writing(True)
        try:
            future = self.beside.executor.submit(work)
        except BaseException:
            self.writing(False)
            raise
        future.add_done_callback(lambda future: loop.call_soon_threadsafe(over, future))
        return False

    async def taken(self, data: Bytes) -> Landed:
        """As `take`; returns what has landed."""
        found: asyncio.Future[Landed] = asyncio.get_running_loop().create_future()
        self.take(data, lambda landed: None if found.done() else found.set_result(landed))
        return await found


class Landed(NamedTuple):
    """A payload that has landed: where, how many leading targets have their hash, and the defect that it has met."""

    landing: Landing
    intact: int
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.landing.nbytes

    def tell(self) -> None:
        """Tells whoever gave the memory."""
        self.landing.landed(self.intact, self.error)


class Lent(NamedTuple):
    """A payload in memory that its sender can still write, until `give_back`.

    Whoever uses it copies it to memory of its own first, and then verifies the copy.
    """

    data: Bytes
    give_back: Callable[[], None]
