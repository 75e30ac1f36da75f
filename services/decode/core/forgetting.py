"""Deleting KV from a decode instance's pool."""

from collections.abc import Sequence

from moonpool.sched.block_manager import BlockManager
from moonpool.sched.forgetting import ForgetKV, Forgot, forget
from services.decode.core.request import Request


def forget_kv(blocks: BlockManager, event: ForgetKV, requests: Sequence[Request]) -> Forgot:
    """Deletes; of all `requests` that concern it nothing is kept from now on, nor looked for in kvstores."""
    keys = ((it.owner, [key for member in it.members for key in member.keys]) for it in requests)
    forgot = forget(blocks, event, keys)
    for request in requests:
        if request.owner.transient:
            request.keep_nothing()
    return forgot
