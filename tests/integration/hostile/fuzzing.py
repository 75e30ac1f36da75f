"""Messages made from the contract's descriptors: valid ones, nearly valid ones, and random ones.

A message drawn from its descriptor alone rarely gets past the first check. So names of fields suggest values (`HINTS`),
and `Facts` puts into a drawn message what only the running stack knows: a namespace, a live transfer, a right checksum.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from moonpool.base.kv.frames import checksum
from moonpool.v1 import decode_pb2, kv_pb2, kvstore_pb2

F = FieldDescriptor
_INTS = {
    F.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    F.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    F.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    F.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
MAX_DEPTH = 4
TRUE, WRONG = 1, 2
"""Numbers that stand for a live transfer, generation or epoch, and for one that is not."""

Strategy = st.SearchStrategy[Any]


def _one_of(*values: Any) -> Strategy:
    return st.sampled_from(values)


_KEYS = st.builds(lambda count, odd: bytes([7]) * (32 * count + odd), st.integers(0, 6), _one_of(0, 0, 0, 1, 31))
_TOKENS = st.lists(st.integers(-1, 513), max_size=40).map(
    lambda ids: b"".join(token.to_bytes(4, "little", signed=True) for token in ids)
)
_INDEX = _one_of(0, 0, 1, 2, 4, 5, (1 << 32) - 1)

HINTS: dict[str, Strategy] = {
    "address": _one_of("127.0.0.1:1", "127.0.0.1:1", "", "nowhere", "[::1]:0", "unix:///tmp/x", "0.0.0.0:5", "h\0st:5"),
    "keys": _KEYS,
    "parent_keys": _KEYS,
    "stored_keys": _KEYS,
    "removed_keys": _KEYS,
    "block_keys": _KEYS,
    "token_ids": _TOKENS,
    "namespace": _one_of(b"", bytes(32), bytes(32), bytes(31)),
    "chain_root": _one_of(b"", bytes(32), bytes(33)),
    "transfer": _one_of(TRUE, TRUE, WRONG, 0, (1 << 64) - 1),
    "transfer_id": _one_of(TRUE, TRUE, WRONG, 0, (1 << 64) - 1),
    "generation": _one_of(TRUE, TRUE, TRUE, WRONG, 0, (1 << 32) - 1),
    "decode_epoch": _one_of(TRUE, TRUE, WRONG),
    "request_id": _one_of("", "live", "live", "a", "~", "x" * 300, "\x00"),
    "tenant": _one_of("", "raw", "x" * 2000),
    "layer": _INDEX,
    "layer_begin": _INDEX,
    "layer_end": _INDEX,
    "head_begin": _INDEX,
    "head_end": _INDEX,
    "first_block": _INDEX,
    "block_count": _INDEX,
    "valid_tokens": _one_of(16, 16, 4, 0, 17),
    "checksum": _one_of(0, 0, 0, 5),
    "max_tokens": _one_of(1, 2, 8, 0, -1, (1 << 31) - 1),
    "bytes": _one_of(0, 1 << 20, 1 << 20, (1 << 64) - 1),
    "dtype": _one_of("float32", "", "float64"),
    "payload": st.builds(lambda size, odd: bytes(size + odd), _one_of(0, 4096, 8192, 16384), _one_of(0, 0, 1)),
}
_BINARY = st.binary(max_size=200)
_FLOATS = st.one_of(_one_of(0.0, 1.0, -1.0, float("nan"), float("inf"), 1e-45), st.floats(width=32))


@functools.cache
def messages(descriptor: Descriptor, depth: int = 0) -> Strategy:
    """Messages of a class; each of their fields is set or not."""
    cls = message_factory.GetMessageClass(descriptor)
    fields = {f.name: _field(f, depth) for f in descriptor.fields if depth < MAX_DEPTH or f.message_type is None}
    oneofs = [[field.name for field in oneof.fields] for oneof in descriptor.oneofs if len(oneof.fields) > 1]

    @st.composite
    def message(draw: st.DrawFn) -> Message:
        wanted = {name for name in fields if draw(st.booleans())}
        for names in oneofs:
            wanted.difference_update(names)
            wanted.add(draw(st.sampled_from(names)))
        built = cls()
        for name in fields:
            if name in wanted:
                _set(built, name, draw(fields[name]))
        return built

    return message()


def _set(message: Any, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    if isinstance(value, dict):
        getattr(message, name).update(value)
    elif field.is_repeated:
        getattr(message, name).extend(value)
    elif field.message_type is not None:
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


def _field(field: FieldDescriptor, depth: int) -> Strategy:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        keys, values = (_scalar(entry.fields_by_name[name]) for name in ("key", "value"))
        return st.dictionaries(keys, values, max_size=3)
    value = messages(entry, depth + 1) if entry is not None else _scalar(field)
    return st.lists(value, max_size=3) if field.is_repeated else value


def _scalar(field: FieldDescriptor) -> Strategy:
    hint = HINTS.get(field.name)
    if field.type == F.TYPE_BYTES:
        return st.one_of(hint, st.binary(max_size=64)) if hint is not None else st.binary(max_size=64)
    if field.type == F.TYPE_STRING:
        text = st.text(st.characters(codec="utf-8"), max_size=12)
        return st.one_of(hint, text) if hint is not None else text
    if field.type == F.TYPE_BOOL:
        return st.booleans()
    if field.type == F.TYPE_ENUM:
        return st.integers(0, 6)
    if field.cpp_type in _INTS:
        low, high = _INTS[field.cpp_type]
        number = st.one_of(st.integers(max(low, -2), 20), _one_of(low, high))
        if hint is None or field.name == "token_ids":
            return number
        return st.one_of(hint, hint, number).filter(lambda value: low <= value <= high)
    return _FLOATS


def mangled(proper: st.SearchStrategy[Message]) -> st.SearchStrategy[bytes]:
    """Encodings of messages, cut short, with a byte changed, or with bytes behind."""

    def mangle(message: Message, how: int, where: int, byte: int) -> bytes:
        data = message.SerializeToString()
        position = where % (len(data) + 1)
        if how == 0:
            return data[:position]
        if how == 1:
            return data[:position] + bytes([byte]) + data[position + 1 :]
        return data + bytes([byte, where % 256])

    return st.builds(mangle, proper, st.integers(0, 2), st.integers(0, 1 << 16), st.integers(0, 255))


@st.composite
def nearly(draw: st.DrawFn, proper: Message) -> Message:
    """A proper message with a field or two, at any depth, left out or drawn anew."""
    message = type(proper)()
    message.CopyFrom(proper)
    for _ in range(draw(_one_of(0, 1, 1, 1, 2))):
        part: Any = message
        depth = 0
        while True:
            inside = [f.name for f, value in part.ListFields() if f.message_type is not None and not f.is_repeated]
            if not inside or draw(st.integers(0, 3)) == 0:
                break
            part, depth = getattr(part, draw(st.sampled_from(inside))), depth + 1
        if part.DESCRIPTOR.fields:
            field = draw(st.sampled_from(list(part.DESCRIPTOR.fields)))
            part.ClearField(field.name)
            if draw(st.integers(0, 4)):
                _set(part, field.name, draw(_field(field, max(depth, 2))))
    return message


def requests(descriptor: Descriptor, proper: Sequence[Message]) -> Strategy:
    """One request of a class, as a message or as bytes that may be one."""
    drawn = messages(descriptor)
    almost = [nearly(message) for message in proper] or [drawn]
    return st.integers(0, 9).flatmap(
        lambda kind: st.one_of(almost) if kind < 6 else drawn if kind < 8 else mangled(drawn) if kind < 9 else _BINARY
    )


@st.composite
def conversations(draw: st.DrawFn, descriptor: Descriptor, proper: Sequence[Message]) -> list[Message | bytes]:
    """Messages of a stream: a valid sequence with messages left out, changed or inserted."""
    any_request = requests(descriptor, proper)
    story: list[Message | bytes] = []
    for message in proper:
        if draw(st.integers(0, 7)):
            story.append(draw(nearly(message)) if draw(st.integers(0, 2)) == 0 else message)
        if draw(st.integers(0, 9)) == 0:
            story.append(draw(any_request))
    return story


@dataclasses.dataclass(slots=True)
class Facts:
    """What makes a drawn message a proper one of this stack.

    Attributes:
        namespace, layout: of the KV that is served.
        epoch: of the decode instance.
        reserve: gives a live transfer; asked for only when a message speaks of one.
    """

    namespace: bytes
    layout: kv_pb2.KVLayout
    epoch: int
    reserve: Callable[[], kv_pb2.TransferTarget]
    live: kv_pb2.TransferTarget | None = None

    def adapt(self, request: Message | bytes) -> bytes:
        """The request's bytes, with the truth in place of what stands for it."""
        if isinstance(request, bytes):
            return request
        adapted = type(request)()
        adapted.CopyFrom(request)
        self._visit(adapted, isinstance(request, decode_pb2.ReceiveKVRequest))
        return adapted.SerializeToString()

    def _visit(self, message: Any, transfers: bool) -> None:
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            for part in value if field.is_repeated else [value]:
                self._visit(part, transfers)
        match message:
            case kv_pb2.StreamHello() if message.namespace == bytes(32):
                message.namespace = self.namespace
                message.layout.CopyFrom(self.layout)
            case decode_pb2.TransferOpen() | decode_pb2.TransferClose() | decode_pb2.StartSequence():
                self._transfer(message, "transfer_id")
            case decode_pb2.CancelSequence() | kv_pb2.TransferTarget():
                self._transfer(message, "transfer_id")
            case kv_pb2.FrameHeader() if transfers:
                self._transfer(message, "transfer")
        if isinstance(message, decode_pb2.TransferOpen) and message.decode_epoch == TRUE:
            message.decode_epoch = self.epoch
        whole = isinstance(message, kvstore_pb2.PutRequest) and message.open.HasField("frame")
        carrier = message.open if whole else message
        fields = carrier.DESCRIPTOR.fields_by_name
        if "frame" in fields and carrier.frame.checksum == 0 and getattr(message, "payload", b""):
            carrier.frame.checksum = checksum(carrier.frame)

    def _transfer(self, message: Any, name: str) -> None:
        if getattr(message, name) == TRUE:
            self.live = self.live or self.reserve()
            setattr(message, name, self.live.transfer_id)
            if message.generation == TRUE:
                message.generation = self.live.generation
