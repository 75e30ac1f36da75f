"""Where KV is read from: kvstores in virtual time (DRAM, SSD, a link) and the pools of instances."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from moonpool.base.frozen import frozen
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import BlocksLent, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.conductor.core.instances import LoadFacts
from moonpool.kvstore.eviction.policies import POLICIES
from moonpool.kvstore.eviction.retention import SessionRetention
from moonpool.simulator.clock import SimulatedWorld, ps
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.eviction import Pool
from moonpool.simulator.network import Link, Priority, SimulatedNetwork

WRITES_AT_ONCE = 16
"""Puts that a store takes at once; further puts wait in order, as for credits. Two puts fill the link."""


class SimulatedDisk:
    """One queue.

    Args:
        world: the time.
        bytes_per_s: rate for reading or writing.
        access_s: seconds that each request takes besides.

    Attributes:
        carried: bytes for all ended requests.
    """

    def __init__(self, world: SimulatedWorld, bytes_per_s: float, access_s: float = 0.0) -> None:
        self._world = world
        self._bytes_per_s = bytes_per_s
        self._access_s = access_s
        self._free_at = 0
        self.carried = 0

    def request(self, nbytes: int, done: Callable[[], None]) -> None:
        """Queue a request; `done` is called when the request has been served."""
        self._free_at = max(self._free_at, self._world.now) + ps(self._access_s + nbytes / self._bytes_per_s)
        self._world.at(self._free_at, self._served, (nbytes, done))

    def _served(self, request: tuple[int, Callable[[], None]]) -> None:
        nbytes, done = request
        self.carried += nbytes
        done()


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
        """Hold a chain's blocks from `first` on, as far as the blocks are here."""
        ...

    def read(self, keys: Sequence[BlockKey], begin: int, end: int, ready: Callable[[], None]) -> None:
        """Read blocks that are held; `ready` is called when they can be sent."""
        ...


class SimulatedPoolReads:
    """An engine instance's pool, as others read the pool.

    Args:
        sends: the instance's way out.
        post: hands an event to the instance's core.
    """

    def __init__(self, sends: Link, post: Callable[[LendBlocks | ReturnBlocks], None]) -> None:
        self.sends = sends
        self._post = post
        self._asked = 0
        self._lent: dict[int, tuple[int, ...]] = {}
        self.read_blocks = 0

    def answered(self, lent: BlocksLent) -> None:
        """The core's answer."""
        self._lent[lent.number] = lent.blocks

    def lend(self, keys: Sequence[BlockKey], first: int) -> Loan:
        """See `Readable.lend`."""
        self._asked += 1
        number = self._asked
        self._post(LendBlocks(number, tuple(keys[first:])))
        blocks = self._lent.pop(number, ())
        return Loan(len(blocks), lambda: self._post(ReturnBlocks(number)))

    def read(self, keys: Sequence[BlockKey], begin: int, end: int, ready: Callable[[], None]) -> None:
        """See `Readable.read`."""
        self.read_blocks += end - begin
        ready()


@frozen
class Put:
    """Blocks that are to be written."""

    keys: Sequence[BlockKey]
    source: Link
    done: Callable[[], None]


class Store:
    """One kvstore.

    Args:
        on_keys: called with the keys that came, left, or are on SSD only now.
        changed: called when the load changes.

    Attributes:
        read_blocks, disk_blocks: blocks read in all, and from SSD.
        written_blocks: blocks written.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        config: ClusterConfig,
        name: str,
        on_keys: Callable[[KeyChanges], None],
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.sends = Link(f"{name} out", config.load_bytes_per_s)
        self._receives = Link(f"{name} in", config.load_bytes_per_s)
        self._world, self._network, self._config, self._on_keys = world, network, config, on_keys
        self._changed = changed
        self._puts: deque[Put] = deque()
        self.epoch = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Empty the store, as a lost machine's replacement is; what was under way is lost."""
        config = self._config
        self._order = SessionRetention(POLICIES[config.eviction](), lambda: self._world.seconds)
        self._dram = Pool(self._order, max(1, config.store_bytes // config.block_bytes), self._left_dram)
        self._ssd: OrderedDict[BlockKey, None] = OrderedDict()
        self._disk = SimulatedDisk(self._world, config.disk_bytes_per_s)
        self._left: list[BlockKey] = []  # DRAM, or the disk, since the last news
        self.epoch += 1
        for put in self._puts:
            self._world.after(0, _call, put.done)
        self._puts.clear()
        self._writing = self._reading = 0
        self.read_blocks = self.disk_blocks = self.written_blocks = 0

    def held(self) -> KeyChanges:
        """All blocks here."""
        cold = [key for key in self._ssd if key not in self._dram]
        return KeyChanges([*self._dram.keys(), *cold], (), cold)

    def holds(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading keys with blocks here."""
        return next((place for place, key in enumerate(keys) if not self._has(key)), len(keys))

    def tell(self, hint: SessionHint, prefetch: Sequence[BlockKey]) -> None:
        """Take what is known about a session, and read wanted blocks from SSD behind all earlier reads."""
        life, told = self.epoch, self._world.seconds
        self._order.hint(hint)
        cold = [key for key in self._dram.lacking(prefetch) if key in self._ssd]

        def came() -> None:
            if self.epoch == life:
                self._keep(prefetch[: self.holds(prefetch)])
                self._order.hint(hint.after(self._world.seconds - told))

        if cold:
            self._disk.request(len(cold) * self._config.block_bytes, came)

    def load(self) -> LoadFacts:
        """The load as reported by the service."""
        return LoadFacts(running=self._reading + self._writing, waiting=len(self._puts), cached_blocks=len(self._dram))

    def lend(self, keys: Sequence[BlockKey], first: int) -> Loan:
        """See `Readable.lend`; what is read is not evicted here before the end."""
        life = self.epoch
        self._reading += 1
        self._changed()

        def give_back() -> None:
            if self.epoch == life:
                self._reading -= 1
                self._changed()

        return Loan(max(0, self.holds(keys) - first), give_back)

    def _has(self, key: BlockKey) -> bool:
        return key in self._dram or key in self._ssd

    def _lacking(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Keys without blocks here."""
        ssd, lacking = self._ssd, self._dram.lacking(keys)
        return [key for key in lacking if key not in ssd] if ssd else lacking

    def read(self, keys: Sequence[BlockKey], begin: int, end: int, ready: Callable[[], None]) -> None:
        """Read a held chain's blocks `begin` to `end`; call `ready` when the blocks are in DRAM."""
        from_disk = len(self._dram.lacking(keys[begin:end]))
        self.read_blocks += end - begin
        self.disk_blocks += from_disk
        self._keep(keys[:end])
        if from_disk:
            self._disk.request(from_disk * self._config.block_bytes, ready)
        else:
            ready()

    def write(self, keys: Sequence[BlockKey], source: Link, done: Callable[[], None]) -> None:
        """Write a chain's missing blocks over the network, if no more urgent work is there.

        `done` is called at the end, useful or not.
        """
        self._puts.append(Put(keys, source, done))
        self._write_next()
        self._changed()

    def _write_next(self) -> None:
        while self._puts and self._writing < WRITES_AT_ONCE:
            self._write(self._puts.popleft())

    def _write(self, put: Put) -> None:
        missing, life = len(self._lacking(put.keys)), self.epoch
        if not missing:
            self._keep(put.keys)
            self._world.after(0, _call, put.done)
            return

        def written() -> None:
            if self.epoch == life:
                self.written_blocks += missing
                self._keep(put.keys)
                self._writing -= 1
                self._write_next()
                self._changed()
            put.done()

        self._writing += 1
        nbytes = missing * self._config.block_bytes
        self._network.send([put.source, self._receives], nbytes, written, Priority.BACKGROUND)

    def _keep(self, keys: Sequence[BlockKey]) -> None:
        """Note that a chain's blocks are in DRAM now and were used."""
        new = self._dram.lacking(keys)
        self._dram.request(keys)
        left, self._left, ssd = self._dram.lacking(list(dict.fromkeys(self._left))), [], self._ssd
        lost = set(self._lacking(new)) if left else ()
        stored = [key for key in new if key not in lost]
        gone = [key for key in left if key not in ssd] if ssd else left
        if stored or left:
            self._on_keys(KeyChanges(stored, gone, [key for key in left if key in ssd] if ssd else ()))

    def _left_dram(self, key: BlockKey) -> None:
        self._left.append(key)
        most = self._config.disk_bytes // self._config.block_bytes
        if not most:
            return
        self._ssd[key] = None
        self._ssd.move_to_end(key)
        if len(self._ssd) > most:
            self._left.append(self._ssd.popitem(last=False)[0])


def _call(done: Callable[[], None]) -> None:
    done()
