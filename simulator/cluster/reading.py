"""Whom a simulated prefill instance loads prefixes from: kvstores, and the pools of other engine instances."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from moonpool.kv.keys import BlockKey
from moonpool.sched.lending import LendBlocks, Lent, TakeBack
from simulator.kernel.links import Link


class Loan(NamedTuple):
    """Blocks that may be read: how many, and what to do when they are not read any more."""

    blocks: int
    give_back: Callable[[], None]


class Readable(Protocol):
    """Where KV can be read."""

    @property
    def sends(self) -> Link:
        """The way out."""
        ...

    def lend(self, keys: Sequence[BlockKey], first: int) -> Loan:
        """Holds the blocks of a chain from `first` on, as far as they are here."""
        ...

    def read(self, keys: Sequence[BlockKey], begin: int, end: int, ready: Callable[[], None]) -> None:
        """Reads blocks that are held; `ready` is called when they can be sent."""
        ...


class PoolReads:
    """The pool of an engine instance, as others read it.

    Args:
        sends: the instance's way out.
        post: hands an event to its core.
    """

    def __init__(self, sends: Link, post: Callable[[LendBlocks | TakeBack], None]) -> None:
        self.sends = sends
        self._post = post
        self._asked = 0
        self._lent: dict[int, tuple[int, ...]] = {}
        self.read_blocks = 0

    def answered(self, lent: Lent) -> None:
        """The core's answer."""
        self._lent[lent.number] = lent.blocks

    def lend(self, keys: Sequence[BlockKey], first: int) -> Loan:
        """See `Readable.lend`."""
        self._asked += 1
        number = self._asked
        self._post(LendBlocks(number, tuple(keys[first:])))
        blocks = self._lent.pop(number, ())
        return Loan(len(blocks), lambda: self._post(TakeBack(number)))

    def read(self, keys: Sequence[BlockKey], begin: int, end: int, ready: Callable[[], None]) -> None:
        """See `Readable.read`."""
        self.read_blocks += end - begin
        ready()
