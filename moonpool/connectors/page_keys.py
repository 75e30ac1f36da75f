"""Names of pages: an engine's KV of one block on one rank, under the chain keys that conductors know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blake3 import blake3

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import BlockKey, block_keys, chain_root

SALT_MARK = "moonpool:"
"""A salt from an adapter begins so; the root of the chain follows, in hex."""
TENANT_PARAM = "moonpool_tenant"
"""Key in a request's `kv_transfer_params`: whose KV it is."""
_NAMESPACE_CONTEXT = b"moonpool engine pages v1"
_RANK_CONTEXT = b"moonpool page of rank v1"
_HEX_CHARS = 64


def page_namespace(identity: Mapping[str, object]) -> bytes:
    """32-byte namespace of all that makes pages differ, such as weights, version, data type and layout."""
    digest = blake3(_NAMESPACE_CONTEXT)
    for name, value in sorted(identity.items()):
        for part in (name, repr(value)):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def root_of(namespace: bytes, tenant: str, salt: str | None) -> bytes:
    """Root of a prompt's chain. An adapter's salt names the root; another salt is a part of the root."""
    if salt and salt.startswith(SALT_MARK):
        root = salt.removeprefix(SALT_MARK)[:_HEX_CHARS]
        try:
            if len(root) == _HEX_CHARS:
                return bytes.fromhex(root)
        except ValueError:
            pass  # a client's own salt that looks like an adapter's
    return chain_root(namespace, tenant, salt or "")


def rank_key(key: bytes, rank: int) -> BlockKey:
    """Key of a rank's page. The first rank's is the block's own, which conductors look for."""
    return BlockKey(key if rank == 0 else blake3(_RANK_CONTEXT + rank.to_bytes(4, "little") + key).digest())


class PromptKeys:
    """Keys of a prompt's full blocks, computed as tokens come.

    Args:
        root: root of the chain.
        block_size: tokens per block.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self._chain = [BlockKey(root)]
        self._block_size = block_size

    def first(self, count: int, token_ids: Sequence[int]) -> list[BlockKey]:
        """Keys of the first blocks. Raises InvalidRequest if there are not so many full blocks."""
        known, size = len(self._chain) - 1, self._block_size
        if known < count:
            new = block_keys(self._chain[-1], list(token_ids[known * size : count * size]), size)
            if known + len(new) < count:
                raise InvalidRequest("token_ids", f"have no {count} full blocks of {size} tokens")
            self._chain += new
        return self._chain[1 : count + 1]

    def parent(self, index: int) -> BlockKey:
        """Key before a block's."""
        return self._chain[index]
