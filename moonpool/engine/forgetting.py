"""Deleting KV from an engine instance, the same for prefill and decode: from its pool and from its write-back."""

import itertools
from collections.abc import Callable, Sequence

from moonpool.cluster.selections import selection_from_proto
from moonpool.errors import Unavailable
from moonpool.kv.keys import BlockKey
from moonpool.kv.selection import Selection, check_ttls
from moonpool.sched.forgetting import ForgetKV
from moonpool.streams.writeback import WriteBack
from moonpool.v1 import kv_pb2

WRITE_BACK_TIMEOUT_S = 30.0
MAX_APPLIED = 1 << 16
"""Deletions that are known to have been carried out; conductors repeat the latest ones only."""


class Forgetting:
    """Carries out deletions, each once.

    Args:
        namespace: of the pool's KV.
        block_bytes: of a block.
        write_back: of the instance.
        carry_out: tells the core, and gives the number of blocks.
    """

    def __init__(
        self, namespace: bytes, block_bytes: int, write_back: WriteBack, carry_out: Callable[[ForgetKV], int]
    ) -> None:
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._write_back = write_back
        self._carry_out = carry_out
        self._numbers = itertools.count(1)
        self._applied: dict[str, None] = {}

    async def forget(self, request: kv_pb2.ForgetRequest) -> kv_pb2.ForgetResponse:
        """Deletes; returns when no write of such KV is on its way to a kvstore any more.

        Raises:
            InvalidRequest: a selection or a time is wrong.
            Unavailable: such a write does not end; to be asked again.
        """
        ttl_s = tuple(check_ttls(request.ttl_s).items())
        chosen = {one.id: selection_from_proto(one.selection) for one in request.deletions}
        new = {name: selection for name, selection in chosen.items() if name not in self._applied}
        blocks = sum(self._carry_out(self._event(selection)) for selection in new.values())
        if ttl_s:
            blocks += self._carry_out(ForgetKV(next(self._numbers), Selection(), ttl_s=ttl_s))

        def concerns(keys: Sequence[BlockKey], tenant: str) -> bool:
            return any(
                self._namespace in one.namespaces or tenant in one.tenants or not one.keys.isdisjoint(keys)
                for one in new.values()
            )

        if new and not await self._write_back.forget(concerns, WRITE_BACK_TIMEOUT_S):
            raise Unavailable("deleted here, but it is being written to a kvstore that does not answer")
        self._applied.update(dict.fromkeys(new))
        while len(self._applied) > MAX_APPLIED:
            del self._applied[next(iter(self._applied))]
        return kv_pb2.ForgetResponse(blocks=blocks, bytes=blocks * self._block_bytes)

    def _event(self, selection: Selection) -> ForgetKV:
        return ForgetKV(next(self._numbers), selection, self._namespace in selection.namespaces)
