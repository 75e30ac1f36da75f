"""Encoded pictures as blocks of kvstores: their namespace, keys and layout.

A picture's rows are cut into blocks of `BLOCK_ROWS` rows. The rows of all models have one namespace, by which a store
knows them; the model's own namespace is in the keys.
"""

from __future__ import annotations

import struct

from blake3 import blake3

from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.values import layout_of

BLOCK_ROWS = 64
"""Rows of a picture in one block; the last block is filled up with zeros."""
_KEY_CONTEXT = "moonpool picture rows key v1"
PICTURE_NAMESPACE = blake3(derive_key_context="moonpool picture rows namespace v1").digest()
"""Namespace of the rows of all models. No client's name for values gives it."""


def rows_layout(row_bytes: int) -> KVLayout:
    """The layout of blocks with rows of `row_bytes` each.

    Raises:
        InvalidRequest: rows are too long for a block.
    """
    return layout_of(BLOCK_ROWS * row_bytes)


def row_keys(model: bytes, tenant: str, digest: bytes, blocks: int) -> list[BlockKey]:
    """Keys of the first blocks of a picture's rows, in order.

    Args:
        model: 32-byte namespace of the model's KV: of its weights, the encoder's among them, and the element type.
        tenant: whose picture it is; tenants share no rows.
        digest: 32-byte digest of the picture (`media_digest`), which has the processor's settings in it.
        blocks: how many.
    """
    own = blake3(derive_key_context=_KEY_CONTEXT)
    own.update(model + digest + tenant.encode())
    root = own.digest()
    return [BlockKey(blake3(root + struct.pack("<Q", index)).digest()) for index in range(blocks)]
