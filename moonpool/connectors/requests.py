"""The scheduler's half: which blocks of a request to load, and which to save."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Protocol

from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.keys import BlockKey
from moonpool.connectors.page_keys import PromptKeys, rank_key

MAX_LOADS = 2
"""Loads of one request: a block that is found but cannot be loaded is not tried for ever."""
WAIT_S = 0.002
"""A scheduler waits so long for a look-up before it turns to other requests."""


class LookUp(Protocol):
    """`EngineStores.look_up`."""

    def __call__(self, tenant: str, chain: bytes, keys: Sequence[bytes]) -> Future[list[bool]]: ...


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Blocks of a request to load or save.

    Attributes:
        request: id.
        tenant: whose KV it is.
        chain: key of the first block.
        asked_at: when the request came, seconds of the epoch.
        blocks: the engine's block numbers.
        keys: the blocks' keys.
        parents: for each block, the key before.
    """

    request: str
    tenant: str
    chain: bytes
    asked_at: float
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]


@dataclass(slots=True)
class PooledRequest:
    """A request whose blocks may be in the stores.

    Attributes:
        name: id at the engine.
        tenant: whose KV it is.
        keys: keys of the blocks.
        tokens: the tokens so far.
        asked_at: when the request came.
        found: for each leading block, whether the stores have it.
        blocks: the engine's block numbers.
        planned: leading blocks that are saved, or need no save.
    """

    name: str
    tenant: str
    keys: PromptKeys
    tokens: Sequence[int]
    asked_at: float = field(default_factory=time.time)
    found: list[bool] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    loads: int = 0
    local: int = 0
    lookup: Future[list[bool]] | None = None
    give_up_at: float = 0.0

    def plan(self, indices: Sequence[int]) -> BlockPlan:
        """A plan for some blocks."""
        keys = self.keys.first(max(indices) + 1, self.tokens)
        parents = tuple([keys[at - 1] if at else NO_PARENT for at in indices])
        return BlockPlan(
            self.name, self.tenant, keys[0], self.asked_at, tuple([self.blocks[at] for at in indices]),
            tuple([keys[at] for at in indices]), parents,
        )  # fmt: skip


class RequestPlanner:
    """Follows the requests of a scheduler.

    Args:
        block_size: tokens per block.
        ranks: workers that hold a part of each block.
        look_up: asks the stores.
        limit_s: longest wait for a look-up.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        block_size: int,
        ranks: int,
        look_up: LookUp,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_size, self._ranks = block_size, ranks
        self._look_up, self._limit_s, self._clock = look_up, limit_s, clock
        self._requests: dict[str, PooledRequest] = {}
        self._to_load: dict[str, BlockPlan] = {}
        self.lookups_late = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: PooledRequest) -> None:
        """A request has come; the stores are asked at once."""
        self._requests[request.name] = request
        self._ask(request)

    def remove(self, name: str) -> None:
        """A request has ended."""
        self._requests.pop(name, None)
        self._to_load.pop(name, None)

    def matched_blocks(self, name: str, local: int) -> int | None:
        """Blocks in the stores behind `local` blocks of the engine; None = not known yet, ask again."""
        request = self._requests.get(name)
        if request is None or request.loads >= MAX_LOADS:
            return 0
        if request.lookup is None:
            self._ask(request)
        assert request.lookup is not None
        try:
            request.found = request.lookup.result(WAIT_S)
        except NotYet:
            if self._clock() < request.give_up_at:
                return None
            self.lookups_late += 1
            request.found = []
        request.local = local
        most = (len(request.tokens) - 1) // self._block_size  # the last token is computed in any case
        there = request.found[local:most]
        return there.index(False) if False in there else len(there)

    def allocated(self, name: str, blocks: Sequence[int], count: int) -> None:
        """The engine has blocks for a request; `count` of them are to be loaded."""
        request = self._requests.get(name)
        if request is None:
            return
        request.blocks = list(blocks)
        if count:
            request.loads += 1
            self._to_load[name] = request.plan(range(request.local, request.local + count))

    def scheduled(self, name: str, blocks: Sequence[int], ready: int, *, whole: bool) -> BlockPlan | None:
        """A step computes a request's blocks until `ready` are full. Returns what to save behind the step.

        `blocks`: new block numbers; `whole`: all of the request's.
        """
        request = self._requests.get(name)
        if request is None:
            return None
        # Asked anew if the engine preempts the request: stores and engine may hold other blocks by then.
        request.lookup = None
        request.blocks = list(blocks) if whole else [*request.blocks, *blocks]
        ready = min(ready, len(request.blocks), len(request.tokens) // self._block_size)
        found = request.found
        missing = [at for at in range(request.planned, ready) if at >= len(found) or not found[at]]
        request.planned = max(request.planned, ready)
        return request.plan(missing) if missing else None

    def take_loads(self) -> list[BlockPlan]:
        """Return the loads to begin."""
        loads, self._to_load = list(self._to_load.values()), {}
        return loads

    def _ask(self, request: PooledRequest) -> None:
        keys = request.keys.first(len(request.tokens) // self._block_size, request.tokens)
        request.lookup = self._ask_ranks(request.tenant, keys)
        request.give_up_at = self._clock() + self._limit_s

    def _ask_ranks(self, tenant: str, keys: Sequence[BlockKey]) -> Future[list[bool]]:
        """Whether all ranks' pages of each block are there."""
        if not keys:
            nothing: Future[list[bool]] = Future()
            nothing.set_result([])
            return nothing
        ranks = self._ranks
        found = self._look_up(tenant, keys[0], [rank_key(key, rank) for key in keys for rank in range(ranks)])
        if ranks == 1:
            return found
        whole: Future[list[bool]] = Future()

        def merge(pages: Future[list[bool]]) -> None:
            told = pages.result()
            whole.set_result([all(told[at : at + ranks]) for at in range(0, len(told), ranks)])

        found.add_done_callback(merge)
        return whole
