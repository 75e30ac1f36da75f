"""The contracts: generated code is up to date, nothing released is broken, and the house rules are kept."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from moonpool.v1 import adapter_pb2, calls_pb2, conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2, prefill_pb2
from tests.unit.base.contracts.breaking import breaking_changes, renamed

ROOT = Path(__file__).parents[4]
MODULES = (adapter_pb2, calls_pb2, conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2, prefill_pb2)


def released() -> FileDescriptorSet:
    return FileDescriptorSet.FromString((ROOT / "protos/released.binpb").read_bytes())


def current() -> FileDescriptorSet:
    files = FileDescriptorSet()
    for module in MODULES:
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def test_generated_code_is_what_the_protos_say(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "tools/gen_protos.py"), "--out", str(tmp_path)]
    done = subprocess.run(tool, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "moonpool/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "moonpool/v1").glob("*_pb2*.py*")}
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    assert not stale, f"run `make protos`; not up to date: {stale}"
    assert len(fresh) == 4 * (len(MODULES) + 1)  # and Envoy's, which are not ours to release


def test_nothing_released_is_broken() -> None:
    assert breaking_changes(renamed(released()), current()) == []


def field(files: FileDescriptorSet, message: str, name: str) -> FieldDescriptorProto:
    (found,) = (
        f for file in files.file for m in file.message_type if m.name == message for f in m.field if f.name == name
    )
    return found


def renumber(files: FileDescriptorSet) -> None:
    field(files, "KVLayout", "dtype").number = 99


def retype(files: FileDescriptorSet) -> None:
    field(files, "KVLayout", "layers").type = FieldDescriptorProto.TYPE_STRING


def rename(files: FileDescriptorSet) -> None:
    field(files, "KVLayout", "layers").name = "depth"


def lose_presence(files: FileDescriptorSet) -> None:
    field(files, "Gauge", "at_rest").proto3_optional = False


def leave_oneof(files: FileDescriptorSet) -> None:
    field(files, "PrefillResponse", "accepted").ClearField("oneof_index")


def remove_message(files: FileDescriptorSet) -> None:
    for file in files.file:
        kept = [m for m in file.message_type if m.name != "Credit"]
        del file.message_type[:]
        file.message_type.extend(kept)


def remove_enum_value(files: FileDescriptorSet) -> None:
    for file in files.file:
        for enum in file.enum_type:
            if enum.name == "FinishReason":
                del enum.value[-1]


def remove_method(files: FileDescriptorSet) -> None:
    for file in files.file:
        for service in file.service:
            if service.name == "DecodeService":
                del service.method[0]


def unstream_method(files: FileDescriptorSet) -> None:
    for file in files.file:
        for service in file.service:
            for method in service.method:
                if method.name == "Steps":
                    method.server_streaming = False


def add_things(files: FileDescriptorSet) -> None:
    files.file[0].message_type.add(name="Extra").field.add(name="x", number=1)
    files.file[0].message_type[0].field.add(name="extra", number=500)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (renumber, ["moonpool.v1.KVLayout.dtype = 6 is gone"]),
        (retype, ["moonpool.v1.KVLayout.layers = 2 changed"]),
        (rename, ["moonpool.v1.KVLayout.layers = 2 changed"]),
        (lose_presence, ["moonpool.v1.Gauge.at_rest = 3 changed"]),
        (leave_oneof, ["moonpool.v1.PrefillResponse.accepted = 1 changed"]),
        (remove_message, ["message moonpool.v1.Credit is gone"]),
        (remove_enum_value, ["moonpool.v1.FinishReason.FINISH_REASON_CANCELLED = 3 is gone or changed"]),
        (remove_method, ["method moonpool.v1.DecodeService.Reserve is gone"]),
        (unstream_method, ["method moonpool.v1.DecodeService.Steps changed"]),
        (add_things, []),
    ],
)
def test_a_breaking_change_is_named(change: Callable[[FileDescriptorSet], None], complaint: list[str]) -> None:
    later = current()
    change(later)
    assert breaking_changes(current(), later) == complaint


def test_every_payload_is_field_15_of_bytes() -> None:
    carriers = [
        (message.full_name, field.number, field.type)
        for module in MODULES
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.name == "payload"
    ]
    assert {name.rpartition(".")[2] for name, _, _ in carriers} == {
        "ReceiveKVRequest",
        "PutRequest",
        "GetResponse",
        "ReadKVResponse",
    }
    assert {(number, kind) for _, number, kind in carriers} == {(15, FieldDescriptorProto.TYPE_BYTES)}


def test_requests_and_responses_are_a_methods_own() -> None:
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"


def test_every_enum_begins_unspecified() -> None:
    for module in MODULES:
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_every_method_message_and_field_is_explained() -> None:
    """One sentence above each; oneof members and empty messages speak through their type's own sentence."""
    for path in sorted((ROOT / "protos/moonpool/v1").glob("*.proto")):
        lines = [line.strip() for line in path.read_text().splitlines()]
        for above, line in itertools.pairwise(lines):
            if line.startswith(("rpc ", "message ", "service ", "enum ")):
                assert above.startswith("//"), f"{path.name}: {line}"
