"""Kvstore clients for other engines' KV: `KVClient` for blocking code, `AsyncKVClient` for asyncio.

    from moonpool.client.kv import KVClient, content_key

    with KVClient("127.0.0.1:50060", namespace="my-engine/llama-8b/v1") as client:
        client.put(b"block-17", data)
        again = client.get(b"block-17")

See docs/kvclient.md. Errors are those of `moonpool.errors`.
"""

from moonpool.client.kv.client import AsyncBlockClient, AsyncKVClient, KVClient
from moonpool.errors import (
    InvalidRequest,
    MoonpoolError,
    Overloaded,
    PermissionDenied,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from moonpool.kv.values import MAX_KEY_BYTES, MAX_VALUE_BYTES, content_key

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
