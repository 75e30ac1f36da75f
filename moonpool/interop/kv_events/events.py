"""KV events of engines, read from decoded messages.

The events are those of vLLM: maps since 2026, arrays before. SGLang sends the same, with salts in a field of their own.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from moonpool.base.errors import InvalidRequest
from moonpool.base.frozen import frozen

BlockHash = int | bytes
"""An engine's own name for a block and everything before: a number, or a digest's bytes."""
ExtraKeys = tuple[object, ...]
"""Parts of a block's hash beside the tokens: a cache salt, an adapter's name, images."""
TOKENS = 1 << 31
"""Token ids are below this number: keys are computed from 32-bit numbers."""
GROUPS = 64
"""Layer groups are below this number; vLLM's models have a handful."""
_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Fields of events that come as arrays, in their order."""


@frozen
class BlockStored:
    """Consecutive blocks of a chain are held from now on.

    Attributes:
        hashes: the blocks' hashes.
        parent: hash of the block before them; None = they begin the chain.
        token_ids: tokens for all blocks, `block_size` each.
        block_size: tokens per block.
        medium: memory or storage that holds them.
        extra_keys: for each block; None = the engine does not tell them.
        lora: name of the LoRA adapter that computed them; "" = none.
        group: number of the layer group.
        kind: the group's kind of attention; "" = not told.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str = ""
    extra_keys: tuple[ExtraKeys, ...] | None = None
    lora: str = ""
    group: int = 0
    kind: str = ""


@frozen
class BlockRemoved:
    """Blocks are not held any more.

    Attributes:
        hashes: the blocks' hashes; no block of which another copy is left.
        medium: memory or storage that held them.
        group: number of the layer group; None = every group.
    """

    hashes: tuple[BlockHash, ...]
    medium: str = ""
    group: int | None = None


@frozen
class AllBlocksCleared:
    """No block is held any more."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


@frozen
class EventBatch:
    """The events from one engine step. `time`: seconds since 1970, by the engine's clock."""

    time: float
    events: tuple[EngineEvent, ...]


def decode_batch(payload: bytes, *, salt_field: bool = False) -> EventBatch:
    """An event batch as engines send it, in msgpack; see `read_batch`.

    Raises:
        InvalidRequest: the bytes are no event batch; names the field at fault.
    """
    try:
        message = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError) as error:  # no msgpack, a text that is no UTF-8, or nested without end
        raise InvalidRequest("batch", f"is no msgpack: {error}") from None
    return read_batch(message, salt_field=salt_field)


def read_batch(message: object, *, salt_field: bool = False) -> EventBatch:
    """An event batch from a decoded message. Unknown kinds of events and unknown fields are skipped.

    With `salt_field`, maps tell the salt of a chain in `cache_salt`, and no salt where this is missing.

    Raises:
        InvalidRequest: the message is no event batch; names the field at fault.
    """
    if isinstance(message, Mapping):
        time, events = message.get("ts"), message.get("events")
    elif isinstance(message, Sequence) and len(message) >= 2:
        time, events = message[0], message[1]
    else:
        raise InvalidRequest("batch", "must be a map, or an array of time and events")
    if not isinstance(time, int | float) or not isfinite(time):  # a NaN is never the time of the last batch
        raise InvalidRequest("batch.ts", f"must be a number, is {time!r}")
    if not isinstance(events, Sequence) or isinstance(events, str | bytes):
        raise InvalidRequest("batch.events", "must be a list")
    return EventBatch(
        float(time), tuple([found for event in events if (found := _event(event, salt_field)) is not None])
    )


def write_batch(batch: EventBatch, rank: int = 0) -> list[object]:
    """A batch as vLLM's message: an array, with events as maps. The message is to be encoded with msgpack."""
    return [batch.time, [_map_of(event) for event in batch.events], rank]


def _map_of(event: EngineEvent) -> dict[str, object]:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": event.lora or None,
                "extra_keys": event.extra_keys and [list(keys) or None for keys in event.extra_keys],
                "group_idx": event.group,
                "kv_cache_spec_kind": event.kind,
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _event(message: object, salt_field: bool) -> EngineEvent | None:
    if isinstance(message, Mapping):
        kind, fields = message.get("type"), dict(message)
    elif isinstance(message, Sequence) and not isinstance(message, str | bytes) and message:
        kind = message[0]
        fields = dict(zip(_FIELDS.get(kind, ()) if isinstance(kind, str) else (), message[1:], strict=False))
    else:
        raise InvalidRequest("event", "must be a map or an array")
    match kind:
        case "BlockStored":
            salted = salt_field and isinstance(message, Mapping)
            return _stored(fields | {"extra_keys": _salts(fields)} if salted else fields)
        case "BlockRemoved":
            return _removed(fields)
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case str():
            return None
    raise InvalidRequest("event.type", f"must be a text, is {kind!r}")


def _salts(fields: Mapping[str, Any]) -> list[object] | None:
    hashes, salt = fields.get("block_hashes"), _text(fields, "cache_salt")
    if not isinstance(hashes, Sequence):
        return None
    first = [[salt]] if salt and fields.get("parent_block_hash") is None else [None]
    return [*first, *[None] * (len(hashes) - 1)] if hashes else []


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    hashes, tokens, size = _hashes(fields), fields.get("token_ids"), fields.get("block_size")
    parent, extra, group = fields.get("parent_block_hash"), fields.get("extra_keys"), fields.get("group_idx")
    if not isinstance(size, int) or size < 1:
        raise InvalidRequest("event.block_size", f"must be a number of tokens, is {size!r}")
    if not isinstance(tokens, Sequence) or not all(isinstance(token, int) and 0 <= token < TOKENS for token in tokens):
        raise InvalidRequest("event.token_ids", f"must be a list of numbers from 0 to {TOKENS - 1}")
    if parent is not None and not isinstance(parent, int | bytes):
        raise InvalidRequest("event.parent_block_hash", f"must be a number or bytes, is {parent!r}")
    if extra is not None and (not isinstance(extra, Sequence) or len(extra) != len(hashes)):
        raise InvalidRequest("event.extra_keys", f"must be a list of {len(hashes)}")
    return BlockStored(
        hashes,
        parent,
        tokens,
        size,
        _text(fields, "medium"),
        None if extra is None else tuple([_extra_keys(keys) for keys in extra]),
        lora=_lora_of(fields.get("lora_name"), fields.get("lora_id")),
        group=_group(group) or 0,
        kind=_text(fields, "kv_cache_spec_kind"),
    )


def _lora_of(name: object, number: object) -> str:
    """An adapter's name; older engines tell a number alone."""
    return str(name) if name else "" if number is None else str(number)


def _removed(fields: Mapping[str, Any]) -> BlockRemoved:
    hashes, left, group = _hashes(fields), fields.get("remaining_copy_counts"), fields.get("group_idx")
    if isinstance(left, Sequence) and len(left) == len(hashes):
        hashes = tuple([block_hash for block_hash, copies in zip(hashes, left, strict=True) if not copies])
    return BlockRemoved(hashes, _text(fields, "medium"), _group(group))


def _group(group: object) -> int | None:
    if group is None:
        return None
    if not isinstance(group, int) or not 0 <= group < GROUPS:
        raise InvalidRequest("event.group_idx", f"must be a number from 0 to {GROUPS - 1}, is {group!r}")
    return group


def _hashes(fields: Mapping[str, Any]) -> tuple[BlockHash, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, Sequence) or not all(isinstance(block_hash, int | bytes) for block_hash in hashes):
        raise InvalidRequest("event.block_hashes", "must be a list of numbers or bytes")
    return tuple(hashes)


def _extra_keys(extra: object) -> ExtraKeys:
    if extra is None:
        return ()
    return tuple(extra) if isinstance(extra, Sequence) and not isinstance(extra, str | bytes) else (extra,)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""
