"""What in a new set of contracts would break those who speak the old one."""

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

RENAMED = {
    "block_tokens": "block_size",
    "incarnation": "epoch",
    "decode_incarnation": "decode_epoch",
    "step_tokens": "max_num_batched_tokens",
    "lane": "transport",
    "lanes": "transports",
    "lane_place": "transport_place",
    "nixl_agent": "description",
    "Lane": "TransportOffer",
    "LaneKind": "TransportKind",
    "LaneOpen": "TransportOpen",
    "LaneOpened": "TransportOpened",
    "LaneFrame": "TransportFrame",
    **{
        f"{message}.session": "transfer"
        for message in (
            "FrameHeader",
            *(f"Read{step}" for step in ("Open", "Opened", "Missing", "Done", "Close")),
            *(f"Put{step}" for step in ("Open", "Opened", "Ack", "Close", "Refused")),
        )
    },
    **{f"LANE_KIND_{kind}": f"TRANSPORT_KIND_{kind}" for kind in ("UNSPECIFIED", "LOCAL", "TCP", "TLS", "NIXL")},
}
"""Released name, or message and field, -> name now. Names are not on the wire; numbers and types are, and stay."""


def renamed(released: FileDescriptorSet) -> FileDescriptorSet:
    """The released contracts with the names of today."""
    files = FileDescriptorSet()
    files.CopyFrom(released)
    for _, message in _all_messages(files):
        message.name = RENAMED.get(message.name, message.name)
        for field in message.field:
            field.name = RENAMED.get(f"{message.name}.{field.name}") or RENAMED.get(field.name, field.name)
            path, _, last = field.type_name.rpartition(".")
            field.type_name = f"{path}.{RENAMED.get(last, last)}" if last else ""
    for _, enum in _all_enums(files):
        enum.name = RENAMED.get(enum.name, enum.name)
        for value in enum.value:
            value.name = RENAMED.get(value.name, value.name)
    return files


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """One line per thing removed, renamed, renumbered or retyped; additions are fine."""
    return [*_messages(old, new), *_enums(old, new), *_methods(old, new)]


def _messages(old: FileDescriptorSet, new: FileDescriptorSet) -> Iterator[str]:
    later = dict(_all_messages(new))
    for name, message in _all_messages(old):
        if name not in later:
            yield f"message {name} is gone"
            continue
        fields = {field.number: field for field in later[name].field}
        for field in message.field:
            found = fields.get(field.number)
            if found is None:
                yield f"{name}.{field.name} = {field.number} is gone"
            elif _shape(found, later[name]) != _shape(field, message):
                yield f"{name}.{field.name} = {field.number} changed"


def _shape(field: FieldDescriptorProto, message: DescriptorProto) -> tuple[object, ...]:
    """Everything about a field that its users see, on the wire or in code."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.name, field.type, field.label, field.type_name, field.proto3_optional, oneof


def _enums(old: FileDescriptorSet, new: FileDescriptorSet) -> Iterator[str]:
    later = {name: {v.number: v.name for v in enum.value} for name, enum in _all_enums(new)}
    for name, enum in _all_enums(old):
        for value in enum.value:
            if later.get(name, {}).get(value.number) != value.name:
                yield f"{name}.{value.name} = {value.number} is gone or changed"


def _methods(old: FileDescriptorSet, new: FileDescriptorSet) -> Iterator[str]:
    later = _all_methods(new)
    for name, shape in _all_methods(old).items():
        if name not in later:
            yield f"method {name} is gone"
        elif later[name] != shape:
            yield f"method {name} changed"


def _all_messages(files: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    def walk(prefix: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
        name = f"{prefix}.{message.name}"
        yield name, message
        for nested in message.nested_type:
            yield from walk(name, nested)

    for file in files.file:
        for message in file.message_type:
            yield from walk(file.package, message)


def _all_enums(files: FileDescriptorSet) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for file in files.file:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in _all_messages(files):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _all_methods(files: FileDescriptorSet) -> dict[str, tuple[str, str, bool, bool]]:
    return {
        f"{file.package}.{service.name}.{m.name}": (m.input_type, m.output_type, m.client_streaming, m.server_streaming)
        for file in files.file
        for service in file.service
        for m in service.method
    }
