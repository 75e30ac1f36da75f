"""Translates which KV is to be deleted between the contract's message and plain values."""

from google.protobuf.message import DecodeError

from moonpool.errors import InvalidRequest
from moonpool.kv.keys import KEY_BYTES, pack_keys, unpack_keys
from moonpool.kv.selection import Selection
from moonpool.v1 import kv_pb2

DELETION = "deletion"
"""Kind of the records that are deletions."""
MAX_SELECTED_KEYS = 1 << 16
MAX_SELECTED_NAMES = 1 << 10


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


def deletion_from_record(record: kv_pb2.Record) -> Selection:
    """What a deletion's record deletes.

    Raises:
        InvalidRequest: the record is no deletion.
    """
    try:
        return selection_from_proto(kv_pb2.Deletion.FromString(record.value).selection, "records.value.selection")
    except DecodeError as error:
        raise InvalidRequest("records.value", f"is no deletion: {error}") from error
