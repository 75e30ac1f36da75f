"""Translates which KV is to be deleted between the contract's message and plain values."""

import asyncio
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from moonpool.errors import InvalidRequest
from moonpool.kv.keys import KEY_BYTES, pack_keys, unpack_keys
from moonpool.kv.selection import Selection
from moonpool.v1 import kv_pb2

DELETION = "deletion"
"""Kind of the records that are deletions."""
MAX_SELECTED_KEYS = 1 << 16
MAX_SELECTED_NAMES = 1 << 10
PORTION, DELETION_COSTS = 1 << 14, 8
"""Keys and names of deletions that are read or carried out in one turn of the event loop; each deletion costs more."""


def selection_to_proto(selection: Selection) -> kv_pb2.Selection:
    """The contract's form of a selection."""
    return kv_pb2.Selection(
        keys=pack_keys(sorted(selection.keys)),
        tenants=sorted(selection.tenants),
        namespaces=sorted(selection.namespaces),
    )


def selection_from_proto(message: kv_pb2.Selection, field: str = "selection") -> Selection:
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
    return Selection(frozenset(keys), frozenset(message.tenants), frozenset(message.namespaces))


async def read_deletions(deletions: Iterable[kv_pb2.Deletion]) -> list[dict[str, Selection]]:
    """What deletions delete, by their ids; in portions, between which other tasks are to have a turn.

    Raises:
        InvalidRequest: one is wrong.
    """
    portions: list[dict[str, Selection]] = [{}]
    names = 0
    for one in deletions:
        selection = selection_from_proto(one.selection)
        if names and names + len(selection) >= PORTION:
            portions.append({})
            names = 0
            await asyncio.sleep(0)
        portions[-1][one.id] = selection
        names += DELETION_COSTS + len(selection)
    return portions


def deletion_from_record(record: kv_pb2.Record) -> Selection:
    """What a deletion's record deletes.

    Raises:
        InvalidRequest: the record is no deletion.
    """
    try:
        return selection_from_proto(kv_pb2.Deletion.FromString(record.value).selection, "records.value.selection")
    except DecodeError as error:
        raise InvalidRequest("records.value", f"is no deletion: {error}") from error
