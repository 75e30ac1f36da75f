"""Deleting KV from an instance's pool: the event, the answer, and how many blocks were deleted."""

from collections.abc import Iterable

from moonpool.base.frozen import frozen
from moonpool.base.kv.delete_kv import KVSelection, ttl_of
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import BlockManager, KVOwner


@frozen
class DeleteKV:
    """Deletes KV from the pool. Answered by `KVDeleted`.

    Requests that compute or hold such KV continue, but the pool keeps none of their blocks, neither now nor later.

    Attributes:
        number: names the answer.
        everything: the selection names the pool's own namespace.
        ttl_s: also deletes blocks older than their tenant's TTL: tenant, seconds.
    """

    number: int
    selection: KVSelection
    everything: bool = False
    ttl_s: tuple[tuple[str, float], ...] = ()


@frozen
class KVDeleted:
    """The pool does not find the KV any more. `blocks`: number of deleted blocks."""

    number: int
    blocks: int


def delete_kv(
    manager: BlockManager, event: DeleteKV, requests: Iterable[tuple[KVOwner, Iterable[BlockKey]]]
) -> KVDeleted:
    """Delete KV from a pool; `requests`: owner and block keys for each request at the instance."""
    chosen, ttl_s = event.selection, dict(event.ttl_s)

    def takes(key: BlockKey, tenant: str, age_s: float) -> bool:
        return event.everything or chosen.matches(key, tenant, b"") or age_s > ttl_of(ttl_s, tenant)

    for owner, keys in requests:
        if event.everything or chosen.touches(keys, owner.tenant, b""):
            owner.transient = True
    keys = manager.held(takes)
    manager.forget(keys)
    return KVDeleted(event.number, len(keys))
