"""Deleting KV from an engine instance, the same for prefill and decode: from its pool and from its write-back."""

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from moonpool.cluster.selections import read_deletions
from moonpool.errors import Unavailable
from moonpool.kv.deletions import Deletions
from moonpool.kv.selection import Selection, check_ttls
from moonpool.sched.forgetting import ForgetKV
from moonpool.streams.writeback import Job, WriteBack
from moonpool.v1 import kv_pb2

WRITE_BACK_TIMEOUT_S = 30.0
MAX_CARRIED_OUT = 1 << 16
"""Deletions that are known to have been carried out; conductors repeat those of the last month only."""
DEMANDED_S = 3600.0
"""For so long others must have carried out a deletion, too, if KV is to be taken from them: far longer than older KV is
on its way, minutes as a rule; far shorter than conductors repeat deletions to those who join."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ending:
    """A deletion whose blocks are gone here, while writes of such KV are still under way."""

    blocks: int
    writes: tuple[Job, ...]


class CarriedOut:
    """The deletions that an engine instance has carried out. Those of the longest ago are forgotten.

    What it says of itself, that it has carried them out, is true for good. What it demands of others is so for a while
    only: one who has come since may never have been told of an old deletion, and has nothing that is older.

    Args:
        namespace: of its KV.
        clock: seconds.
    """

    def __init__(self, namespace: bytes, clock: Callable[[], float]) -> None:
        self.namespace = namespace
        self._clock = clock
        self._deletions = Deletions()
        self._demanded = Deletions()
        self._until: deque[tuple[float, str]] = deque()  # those that are demanded, first come first

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._deletions

    def add(self, name: str, selection: Selection) -> None:
        """The pool has nothing of it any more."""
        self._deletions.add(name, selection)
        self._drop_old()
        self._demanded.add(name, selection)
        self._until.append((self._clock() + DEMANDED_S, name))
        while len(self._deletions) > MAX_CARRIED_OUT:
            self._deletions.remove(next(iter(self._deletions)))

    def concerning(self, keys: Iterable[bytes], tenant: str) -> list[str]:
        """Those of such blocks: what is given to others is younger."""
        return self._deletions.concerning(keys, tenant, self.namespace)

    def demanded(self, keys: Iterable[bytes], tenant: str) -> list[str]:
        """Those of such blocks that somebody must have carried out, too, of whom they are taken."""
        self._drop_old()
        return self._demanded.concerning(keys, tenant, self.namespace)

    def _drop_old(self) -> None:
        while self._until and self._until[0][0] <= self._clock():
            self._demanded.remove(self._until.popleft()[1])


class Forgetting:
    """Carries out deletions, each once, however often and by how many conductors it is ordered.

    Args:
        block_bytes: of a block.
        write_back: of the instance.
        carry_out: tells the core, and gives the number of blocks.
        carried_out: what others are told of, who give or take KV; deletions are added here.
    """

    def __init__(
        self,
        block_bytes: int,
        write_back: WriteBack,
        carry_out: Callable[[ForgetKV], int],
        carried_out: CarriedOut,
    ) -> None:
        self._namespace = carried_out.namespace
        self._block_bytes = block_bytes
        self._write_back = write_back
        self._carry_out = carry_out
        self._carried_out = carried_out
        self._numbers = itertools.count(1)
        self._ending: dict[str, _Ending] = {}

    async def forget(self, request: kv_pb2.ForgetRequest) -> kv_pb2.ForgetResponse:
        """Deletes; returns when no write of such KV is on its way to a kvstore any more.

        Who orders again what is being carried out waits for the same end, and is told the same blocks.

        Raises:
            InvalidRequest: a selection or a time is wrong.
            Unavailable: such a write does not end; to be asked again.
        """
        ttl_s, ending = check_ttls(request.ttl_s), dict[str, _Ending]()
        for chosen in await read_deletions(request.deletions):
            self._begin({name: selection for name, selection in chosen.items() if name not in self._carried_out})
            ending |= {name: self._ending[name] for name in chosen if name in self._ending}
            await asyncio.sleep(0)
        blocks = sum(one.blocks for one in ending.values()) + self._expire(ttl_s)
        writes = {job for one in ending.values() for job in one.writes}
        if not await self._write_back.ended(writes, WRITE_BACK_TIMEOUT_S):
            raise Unavailable("deleted here, but it is being written to a kvstore that does not answer")
        for name in ending:
            self._ending.pop(name, None)
        return kv_pb2.ForgetResponse(blocks=blocks, bytes=blocks * self._block_bytes)

    def _begin(self, new: Mapping[str, Selection]) -> None:
        """From here on the pool has nothing of it, and what is written to kvstores is younger.

        The pool is looked through once. The blocks count as the first one's.
        """
        if not new:
            return
        together = Selection.union(new.values())
        blocks = self._carry_out(self._event(together))
        everything = self._namespace in together.namespaces
        writes = self._write_back.forget(
            lambda keys, tenant: everything or tenant in together.tenants or not together.keys.isdisjoint(keys)
        )
        for name, selection in new.items():
            self._ending[name] = _Ending(blocks, tuple(writes))
            self._carried_out.add(name, selection)
            blocks = 0

    def _expire(self, ttl_s: Mapping[str, float]) -> int:
        if not ttl_s:
            return 0
        return self._carry_out(ForgetKV(next(self._numbers), Selection(), ttl_s=tuple(ttl_s.items())))

    def _event(self, selection: Selection) -> ForgetKV:
        return ForgetKV(next(self._numbers), selection, self._namespace in selection.namespaces)
