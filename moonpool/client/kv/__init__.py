"""Kvstore clients for other engines' KV: `KVClient` for blocking code, `AsyncKVClient` for asyncio.

    from moonpool.client.kv import KVClient, content_key

    with KVClient("127.0.0.1:50060", namespace="my-engine/llama-8b/v1") as client:
        client.put(b"block-17", data)
        again = client.get(b"block-17")

See docs/kvclient.md. Errors are those of `moonpool.base.errors`.
"""

from moonpool.base.errors import (
    InvalidRequest,
    MoonpoolError,
    Overloaded,
    PermissionDenied,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from moonpool.base.kv.values import MAX_KEY_BYTES, MAX_VALUE_BYTES, content_key
from moonpool.client.kv.async_client import AsyncKVClient
from moonpool.client.kv.block_client import AsyncBlockClient
from moonpool.client.kv.blocking_client import KVClient

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "AsyncBlockClient",
    "AsyncKVClient",
    "InvalidRequest",
    "KVClient",
    "MoonpoolError",
    "Overloaded",
    "PermissionDenied",
    "TransferFailed",
    "Unauthenticated",
    "Unavailable",
    "content_key",
]
