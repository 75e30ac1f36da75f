"""Deleting KV from an engine's pool, the same for prefill and decode. Plain values, no I/O."""

from collections.abc import Iterable

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from moonpool.kv.selection import Selection, ttl_of
from moonpool.sched.block_manager import BlockManager, Owner


@frozen
class ForgetKV:
    """KV is to be deleted from the pool. Answered by `Forgot`.

    The requests that compute or hold such KV now go on, but none of their blocks is kept: not one in use, not one that
    they fill later.
    """

    number: int
    """Names the answer."""
    selection: Selection
    everything: bool = False
    """The selection names the pool's own namespace."""
    ttl_s: tuple[tuple[str, float], ...] = ()
    """Besides, blocks that are here for longer than their tenants' may be, seconds by tenant."""


@frozen
class Forgot:
    """Nobody finds the KV in the pool any more."""

    number: int
    blocks: int


def forget(manager: BlockManager, event: ForgetKV, requests: Iterable[tuple[Owner, Iterable[BlockKey]]]) -> Forgot:
    """Deletes; `requests` are the owners of those that are here, with the keys of their blocks."""
    chosen, ttl_s = event.selection, dict(event.ttl_s)

    def takes(key: BlockKey, tenant: str, age_s: float) -> bool:
        return event.everything or chosen.takes(key, tenant, b"") or age_s > ttl_of(ttl_s, tenant)

    for owner, keys in requests:
        if event.everything or owner.tenant in chosen.tenants or not chosen.keys.isdisjoint(keys):
            owner.transient = True
    keys = manager.held(takes)
    manager.forget(keys)
    return Forgot(event.number, len(keys))
