"""`AsyncBlockClient`, the kvstore client for blocks of another engine's KV."""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import Buffer

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import KEY_BYTES, BlockKey
from moonpool.client.kv.async_client import AsyncKVClient


class AsyncBlockClient(AsyncKVClient):
    """A client for blocks of another engine's KV under chain keys (`moonpool.base.kv.keys`).

    Conductors know these keys from the store, and so place prompts by what the store holds. `namespace` is the KV's in
    hex. Keys have 32 bytes. With TLS, the certificate is an engine's, as clients may name no such keys.
    """

    async def put_chain(
        self, blocks: Iterable[tuple[bytes, BlockKey, Buffer]], *, timeout_s: float | None = None
    ) -> int:
        """Store blocks: key, key of the block before (`NO_PARENT` or a chain's root for the first), and bytes.

        Returns the number of new blocks. Raises as `batch_put`.
        """
        return await self._put_all(blocks, self._deadline(timeout_s))

    def _namespace_of(self, name: str) -> bytes:
        return bytes.fromhex(name)

    def _store_key(self, tenant: str, key: bytes) -> BlockKey:
        if len(key) != KEY_BYTES:
            raise InvalidRequest("key", f"must have {KEY_BYTES} bytes, has {len(key)}")
        return BlockKey(key)
