"""Checks and translates contract messages: an instance's description, speeds, KV deletions, pictures."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from google.protobuf.message import DecodeError

from moonpool.base.config import check_peer
from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import KEY_BYTES, pack_keys, unpack_keys
from moonpool.base.kv.media import MediaItem, check_media
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.v1 import conductor_pb2, kv_pb2

MAX_ID_CHARS = 256
MAX_ADDRESS_CHARS = 512
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]")


def check_instance(instance: kv_pb2.Instance, field: str = "instance") -> None:
    """Check that an instance has a name and a reachable address.

    Raises:
        InvalidRequest: names what is wrong, as "FIELD.id" or "FIELD.address".
    """
    if not 1 <= len(instance.id) <= MAX_ID_CHARS or not instance.id.isprintable():
        raise InvalidRequest(f"{field}.id", f"must have 1 to {MAX_ID_CHARS} printable characters")
    address = instance.address
    if len(address) > MAX_ADDRESS_CHARS:
        raise InvalidRequest(f"{field}.address", f"has more than {MAX_ADDRESS_CHARS} characters")
    try:
        check_peer(address)
    except ValueError as error:
        raise InvalidRequest(f"{field}.address", str(error)) from None
    if not _HOST.fullmatch(address.rpartition(":")[0]):
        raise InvalidRequest(f"{field}.address", f"no host has such a name: {address!r}")


_NAMES = tuple(field.name for field in fields(Speeds))


def speeds_to_proto(speeds: Speeds) -> conductor_pb2.SpeedReport:
    """The contract's message."""
    return conductor_pb2.SpeedReport(**{name: getattr(speeds, name) for name in _NAMES})


def speeds_from_proto(report: conductor_pb2.SpeedReport) -> Speeds:
    """The plain values; NaN, negative and infinite values become 0 (unknown)."""
    return Speeds(**{name: finite_or_zero(getattr(report, name)) for name in _NAMES})


def finite_or_zero(value: float) -> float:
    """The value, or 0 for one that no measurement gives: NaN, negative, infinite."""
    return value if 0.0 <= value < float("inf") else 0.0


DELETION = "deletion"
"""Kind of the records that are deletions."""
MAX_SELECTED_KEYS = 1 << 16
MAX_SELECTED_NAMES = 1 << 10
DELETION_PORTION, DELETION_COSTS = 1 << 14, 8
"""Keys and names in deletions that are read or carried out in one event loop turn; each deletion costs more."""


def selection_to_proto(selection: KVSelection) -> kv_pb2.Selection:
    """The contract's form of a selection."""
    return kv_pb2.Selection(
        keys=pack_keys(sorted(selection.keys)),
        tenants=sorted(selection.tenants),
        namespaces=sorted(selection.namespaces),
    )


def selection_from_proto(message: kv_pb2.Selection, field: str = "selection") -> KVSelection:
    """A selection from the contract.

    Raises:
        InvalidRequest: naming what is wrong, below `field`.
    """
    keys = unpack_keys(message.keys, f"{field}.keys", max_keys=MAX_SELECTED_KEYS)
    for name, given in (("tenants", message.tenants), ("namespaces", message.namespaces)):
        if len(given) > MAX_SELECTED_NAMES:
            raise InvalidRequest(f"{field}.{name}", f"at most {MAX_SELECTED_NAMES}, not {len(given)}")
    if any(len(namespace) != KEY_BYTES for namespace in message.namespaces):
        raise InvalidRequest(f"{field}.namespaces", f"each must have {KEY_BYTES} bytes")
    return KVSelection(frozenset(keys), frozenset(message.tenants), frozenset(message.namespaces))


async def read_deletions(deletions: Iterable[kv_pb2.Deletion]) -> list[dict[str, KVSelection]]:
    """What deletions delete, by their ids; in portions, between which other tasks are to have a turn.

    Raises:
        InvalidRequest: one is wrong.
    """
    portions: list[dict[str, KVSelection]] = [{}]
    names = 0
    for deletion in deletions:
        selection = selection_from_proto(deletion.selection)
        if names and names + len(selection) >= DELETION_PORTION:
            portions.append({})
            names = 0
            await asyncio.sleep(0)
        portions[-1][deletion.id] = selection
        names += DELETION_COSTS + len(selection)
    return portions


def deletion_from_record(record: kv_pb2.Record) -> KVSelection:
    """What a deletion's record deletes.

    Raises:
        InvalidRequest: the record is no deletion.
    """
    try:
        return selection_from_proto(kv_pb2.Deletion.FromString(record.value).selection, "records.value.selection")
    except DecodeError as error:
        raise InvalidRequest("records.value", f"is no deletion: {error}") from error


def session_order(hint: SessionHint, prefetch: Sequence[bytes]) -> conductor_pb2.SessionOrder:
    """What a kvstore is told about a session, and the keys of blocks that the kvstore shall have in memory."""
    return conductor_pb2.SessionOrder(
        session=hint.session,
        tail_key=hint.tail,
        return_s=hint.return_s,
        told=hint.told,
        keep_s=hint.keep_s,
        retention=hint.retention,
        ended=hint.ended,
        prefetch_keys=pack_keys(prefetch),
    )


def session_hint_from_proto(message: conductor_pb2.SessionOrder) -> SessionHint:
    """What the conductor says of a session; a wrong key names no block."""
    return SessionHint(
        message.session,
        message.tail_key,
        message.return_s if message.HasField("return_s") else None,
        message.told,
        message.keep_s if message.HasField("keep_s") else None,
        message.retention,
        message.ended,
    )


def media_to_proto(media: Iterable[MediaItem], *, content: bool = True) -> list[kv_pb2.MediaItem]:
    """A prompt's pictures as the contract has them, with their files unless `content` is False."""
    return [
        kv_pb2.MediaItem(
            begin=item.begin,
            end=item.end,
            digest=item.digest,
            content=item.content if content else b"",
            width=item.width,
            height=item.height,
            detail=item.detail,
        )
        for item in media
    ]


def media_from_proto(
    messages: Sequence[kv_pb2.MediaItem], field_name: str, prompt_tokens: int
) -> tuple[MediaItem, ...]:
    """A prompt's pictures; raises as `check_media`, and if the kvstore of one has no name or address."""
    for index, item in enumerate(messages):
        if item.HasField("rows_store"):
            check_instance(item.rows_store, f"{field_name}[{index}].rows_store")
    media = tuple(
        MediaItem(item.begin, item.end, item.digest, item.content, item.width, item.height, item.detail)
        for item in messages
    )
    check_media(field_name, media, prompt_tokens)
    return media
