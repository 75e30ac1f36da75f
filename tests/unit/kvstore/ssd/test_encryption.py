"""Encryption of blocks on SSD: what a disk shows, whose key opens what, and what works without keys."""

import base64
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.base.cluster.proto_conversion import DELETION
from moonpool.base.errors import ConfigError
from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.rpc import watched_files
from moonpool.cli.kvstore import app
from moonpool.client.kv import AsyncKVClient
from moonpool.kvstore import deletion
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.record_store import RecordFolder, read_records
from moonpool.kvstore.repair import repair, verify
from moonpool.kvstore.scrubber import Scrubber
from moonpool.kvstore.ssd.encryption import (
    TAG_BYTES,
    BrokenSealError,
    EncryptionKey,
    Keyring,
    KeysGone,
    RecordCipher,
    Seal,
    add_key,
    drop_keys,
    read_key_file,
)
from moonpool.kvstore.ssd.records import SEALED_MAGIC, pack_header, unpack_header
from moonpool.kvstore.ssd.tier import SsdTier
from moonpool.v1 import kv_pb2
from tests.unit.clocks import hurried
from tests.unit.kvstore.helpers import LAYOUT, RECORD, Driven, block_of, data_of, held, keys_of, slice_of, store
from tests.unit.kvstore.rig import KEYS as RIG_KEYS
from tests.unit.kvstore.rig import rig

KEYS = keys_of(8)
OURS, THEIRS = keys_of(3, "ours"), keys_of(3, "theirs")
TENANTS = ("ours", "theirs")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Keys of two tenants and of all others."""
    path = tmp_path / "keys"
    for tenant in TENANTS:
        add_key(path, tenant)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def keyring(file: Path) -> Keyring:
    return Keyring(file, clock=hurried())


def raw(data: Path) -> bytes:
    """What the disk shows."""
    return b"".join(path.read_bytes() for path in sorted((data / "segments").iterdir()))


def shows(data: Path, keys: Iterable[BlockKey]) -> list[BlockKey]:
    """Blocks of which some plaintext is on disk."""
    found = raw(data)
    return [key for key in keys if any(slice_of(key, layer)[:32] in found for layer in range(LAYOUT.layers))]


def tier(driven: Driven) -> SsdTier:
    assert driven.store.tiers.ssd is not None
    return driven.store.tiers.ssd


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def only_on_disk(driven: Driven) -> None:
    for block in list(driven.store.tiers.dram.values()):
        driven.store.tiers.dram.drop(block)


def key_id(driven: Driven, key: BlockKey) -> str:
    kind = tier(driven).catalogue.kind_of(key)
    assert kind is not None
    return kind.key_id


def filled(data: Path, file: Path) -> None:
    """A folder with blocks of both tenants and of none."""
    with store(data, 16 * RECORD, keyring=keyring(file)) as driven:
        for keys, tenant in ((OURS, "ours"), (THEIRS, "theirs"), (KEYS[:2], "")):
            driven.put(keys, tenant)
        driven.flush()


def test_blocks_come_back_and_the_disk_shows_none_of_them(data: Path, file: Path) -> None:
    with store(data) as driven:
        driven.flush(KEYS[:1])
    assert shows(data, KEYS) == KEYS[:1], "what is looked for is found where nothing is encrypted"
    filled(data, file)
    assert shows(data, [*OURS, *THEIRS, *KEYS]) == KEYS[:1]
    assert raw(data).count(SEALED_MAGIC) == len([*OURS, *THEIRS]) + 1
    with store(data, keyring=keyring(file)) as driven:
        for keys in (OURS, THEIRS, KEYS[:2]):
            assert driven.read(keys) == [data_of(key) for key in keys]
        rows = read_key_file(file)
        assert [key_id(driven, key) for key in (OURS[0], THEIRS[0], KEYS[1])] == [
            rows[tenant][0].id for tenant in ("ours", "theirs", "*")
        ]
        assert key_id(driven, KEYS[0]) == ""
        block = driven.store.tiers.dram.get(OURS[0])
        assert block is None or block.is_intact, "its hashes are the plaintext's again"


def sealed(file: Path) -> tuple[EncryptionKey, DramBlock, Seal, list[memoryview]]:
    """A block of "ours", encrypted."""
    key, block = keyring(file).newest("ours"), block_of(KEYS[0], "ours")
    slices = [block.slice(layer) for layer in range(LAYOUT.layers)]
    return key, block, *RecordCipher.new(key, block.info).seal(slices, block.hashes)


def test_the_same_block_is_never_encrypted_alike(file: Path) -> None:
    (_, block, seal, first), (_, _, other_seal, second) = sealed(file), sealed(file)
    assert seal.salt != other_seal.salt
    assert len({bytes(data) for data in (*first, *second)}) == 2 * LAYOUT.layers
    assert len({bytes(data) for data in map(block.slice, range(LAYOUT.layers))}) == LAYOUT.layers


@pytest.mark.parametrize("change", [{"key": KEYS[1]}, {"tenant": "theirs"}, {"parent": KEYS[1]}, {"written_at": 1}])
def test_a_record_opens_under_its_own_identity_only(file: Path, change: dict[str, Any]) -> None:
    key, block, seal, slices = sealed(file)
    own = RecordCipher(key, block.info, seal.salt)
    other = RecordCipher(key, dataclasses.replace(block.info, **change), seal.salt)
    assert own.open_hashes(seal) == block.hashes
    with pytest.raises(BrokenSealError, match="the hashes"):
        other.open_hashes(seal)
    tag = seal.tags[:TAG_BYTES]
    for cipher, layer in ((other, 0), (own, 1)):
        with pytest.raises(BrokenSealError, match=f"layer {layer} is not"):
            cipher.open_slice(layer, memoryview(bytearray(slices[0])), tag)
    own.open_slice(0, slices[0], tag)
    assert slices[0] == block.slice(0)


def test_new_records_take_the_newest_key_and_old_ones_stay_readable(data: Path, file: Path) -> None:
    filled(data, file)
    keys = keyring(file)
    with store(data, keyring=keys) as driven:
        newest = add_key(file, "ours")
        assert keys.renew() is None, "no key has gone"
        driven.flush([KEYS[5]], "ours")
        assert (key_id(driven, KEYS[5]), key_id(driven, OURS[0]) != newest) == (newest, True)
        only_on_disk(driven)
        assert driven.read([*OURS, KEYS[5]]) == [data_of(key) for key in (*OURS, KEYS[5])]


def test_a_store_without_a_key_serves_the_others_and_says_which_lacks(
    data: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(data, file)
    kept = file.read_text()
    [gone] = drop_keys(file, "ours")
    with store(data, keyring=keyring(file)) as driven:
        assert tier(driven).locked_blocks == len(OURS)
        assert gone in caplog.text
        assert held(driven.store) == {*THEIRS, *KEYS[:2]}
        assert driven.read(THEIRS) == [data_of(key) for key in THEIRS]
        assert driven.read(OURS) == []
        driven.flush(OURS[:1], "ours")  # now as one of all others
        only_on_disk(driven)
        assert driven.read(OURS) == [data_of(OURS[0])]
    file.write_text(kept)
    with store(data, keyring=keyring(file)) as driven:
        assert driven.read(OURS) == [data_of(key) for key in OURS], "what was not overwritten is there again"
    with store(data) as driven:
        assert held(driven.store) == set()
        assert tier(driven).locked_blocks == len({*OURS, *THEIRS, *KEYS[:2]})


async def test_checks_repairs_scrubbing_and_compaction_need_no_key(data: Path, file: Path) -> None:
    filled(data, file)
    report = verify(data)
    ids = {tenant: keys[0].id for tenant, keys in read_key_file(file).items()}
    assert (report.ok, report.key_ids) == (True, {ids["ours"]: 3, ids["theirs"]: 3, ids["*"]: 2})
    assert json.loads(CliRunner().invoke(app, ["verify", str(data), "--json"]).output)["key_ids"] == report.key_ids
    [path] = (data / "segments").iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[RECORD + 4096 + 5] ^= 1  # the second record, of OURS[1]
    path.write_bytes(damaged)
    (data / "index" / "data.mdb").unlink()
    report = verify(data)
    assert (report.fault_count, report.faults[0].key) == (1, OURS[1])
    repair(data, report)
    assert verify(data).ok
    with store(data, 16 * RECORD, keyring=keyring(file)) as driven:
        assert held(driven.store) == {OURS[0], OURS[2], *THEIRS, *KEYS[:2]}
        tier(driven).keyring, kept = None, tier(driven).keyring
        with ThreadPoolExecutor(1) as pool:
            await Scrubber(driven.store, tier(driven), pool, 1 << 40).scrub()
        assert (tier(driven).scrubbed_bytes, driven.store.reads.bad_blocks) == (7 * RECORD, 0)
        tier(driven).forget(THEIRS[:1])
        assert tier(driven).compact(1.0) == 1
        driven.flush()
        assert tier(driven).carried_bytes == 6 * RECORD
        tier(driven).keyring = kept
        wanted = [OURS[2], *THEIRS[1:], *KEYS[:2]]
        assert [driven.read([key]) for key in wanted] == [[data_of(key)] for key in wanted]


@pytest.mark.parametrize("what", ["data", "hashes", "tag"])
def test_what_is_changed_with_the_right_checksums_is_a_miss(data: Path, file: Path, what: str) -> None:
    """As someone does who can write to the disk."""
    with store(data, keyring=keyring(file)) as driven:
        driven.flush(KEYS[:1])
    [path] = (data / "segments").iterdir()
    record = bytearray(path.read_bytes())
    header = unpack_header(record)
    assert header.seal is not None
    seal, hashes = header.seal, list(header.hashes)
    if what == "data":
        record[header.header_bytes] ^= 1
        slice_ = memoryview(record)[header.header_bytes :][: LAYOUT.slice_bytes(0)]
        hashes[0] = bind(slice_hash(slice_), KEYS[0], 0)
    elif what == "hashes":
        seal = Seal(seal.key_id, seal.salt, seal.tags, flipped(seal.hashes))
    else:
        seal = Seal(seal.key_id, seal.salt, flipped(seal.tags), seal.hashes)
    record[: header.header_bytes] = pack_header(header.info, hashes, header.segment, seal)
    path.write_bytes(record)
    assert verify(data).ok, "no checksum tells"
    with store(data, keyring=keyring(file)) as driven:
        assert driven.read(KEYS[:1]) == []
        assert driven.store.reads.bad_blocks == 1


async def test_a_tenant_is_deleted_by_its_keys_while_the_store_serves(
    data: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "LOOK_S", 0.001)
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 0.0)
    async with rig(data, encryption_keys=file) as rigged:
        await rigged.put(RIG_KEYS[:3], "ours")
        await rigged.put(RIG_KEYS[3:5], "theirs")
        async with AsyncKVClient(rigged.address, namespace="n", tenant="ours", transports="grpc") as client:
            await client.put(b"a value", data_of(KEYS[0]) * 8)
            await rigged.durable()
            assert shows(data, [*RIG_KEYS, KEYS[0]]) == []
            drop_keys(file, "ours")
            await rigged.until("ssd_live_bytes", 2 * RECORD)
            await rigged.durable()
            assert await rigged.read(RIG_KEYS[:3]) == []
            assert await client.get(b"a value") is None
        assert await rigged.read(RIG_KEYS[3:5]) == [data_of(key) for key in RIG_KEYS[3:5]]
        assert await rigged.put(RIG_KEYS[:1], "ours") == (0, 1)
        assert await rigged.read(RIG_KEYS[:1]) == [data_of(RIG_KEYS[0])]
        await rigged.at_rest()
    with store(data, keyring=keyring(file)) as driven:
        assert (held(driven.store), tier(driven).locked_blocks) == ({*RIG_KEYS[3:5], RIG_KEYS[0]}, 0)


async def test_an_old_key_that_leaves_the_file_takes_only_its_own_blocks(data: Path, file: Path) -> None:
    async with rig(data, encryption_keys=file) as rigged:
        await rigged.put(RIG_KEYS[:2], "ours")
        await rigged.durable()
        [old] = read_key_file(file)["ours"]
        add_key(file, "ours")
        ssd = rigged.service.store.tiers.ssd
        assert ssd is not None
        ssd.keyring = keyring(file)
        await rigged.put(RIG_KEYS[2:4], "ours")
        await rigged.durable()
        await rigged.service.servicer.deletions.keys_gone(KeysGone(frozenset({old.id}), frozenset()))
        assert set(ssd.catalogue) == {*RIG_KEYS[2:4]}
        await rigged.durable()
        assert await rigged.read(RIG_KEYS[:4]) == [data_of(key) for key in RIG_KEYS[:4]], "DRAM has them"
        await rigged.at_rest()


def test_records_of_conductors_are_encrypted_and_deletions_are_not(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = b"You are a bank's assistant. " * 4
    order = kv_pb2.Deletion(selection=kv_pb2.Selection(tenants=["gone"]))
    context = kv_pb2.Record(kind="context", tenant="ours", id="c", value=prompt, version=3, expires_at=1e12)
    others = kv_pb2.Record(kind="context", tenant="theirs", id="c", value=prompt, version=3, expires_at=1e12)
    deleted = kv_pb2.Record(kind=DELETION, id="d", value=order.SerializeToString(), version=1, expires_at=1e12)

    def records(keys: Keyring | None) -> list[kv_pb2.Record]:
        folder = RecordFolder(tmp_path / "records", keys)
        with contextlib.closing(folder):
            return sorted(folder.load(), key=lambda record: (record.kind, record.tenant))

    folder = RecordFolder(tmp_path / "records", keyring(file))
    folder.load()
    folder.commit([context, others, deleted], ())
    folder.close()
    assert context.value == prompt, "what is served stays as it was"
    raw = (tmp_path / "records" / "data.mdb").read_bytes()
    assert (prompt[:16] in raw, b"gone" in raw) == (False, True)
    assert records(keyring(file)) == [context, others, deleted]
    assert records(None) == [deleted]
    assert read_records(tmp_path / "records")[1] == "", "checked without a key"
    folder = RecordFolder(tmp_path / "records")
    folder.write_anew(read_records(tmp_path / "records")[0])
    folder.close()
    [gone] = drop_keys(file, "ours")
    assert records(keyring(file)) == [others, deleted]
    assert f"key '{gone}' is not in encryption_keys" in caplog.text


def test_what_leaves_a_file_is_told_once_and_a_wrong_file_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keyring(file)
    rows = read_key_file(file)
    assert keys.renew() is None
    text = file.read_text()
    for wrong in ("{", text.replace('"*"', '"+"')):
        file.write_text(wrong)
        assert keys.renew() is None
        assert keys.find(rows["ours"][0].id) == rows["ours"][0]
    assert caplog.text.count("not read again") == 2
    file.write_text(text)
    drop_keys(file, "ours")
    assert keys.renew() == KeysGone(frozenset({rows["ours"][0].id}), frozenset({"ours"}))
    assert keys.renew() is None
    assert keys.newest("ours") == keys.newest("") == rows["*"][0]
    assert keys.find(rows["ours"][0].id) is None


SECRET = base64.b64encode(b"s" * 32).decode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "must be an object"),
        ({}, r"lacks '\*'"),
        ({"*": []}, "must be a list of keys"),
        ({"*": [{"id": "a", "key": SECRET}], "": [{"id": "b", "key": SECRET}]}, "has 1 to 1024 bytes"),
        ({"*": [{"id": "a"}]}, r"tenant '\*', key 1: must be {id, key}"),
        ({"*": [{"id": "a b", "key": SECRET}]}, "id must be 1 to 32 letters"),
        ({"*": [{"id": "a" * 33, "key": SECRET}]}, "id must be 1 to 32 letters"),
        ({"*": [{"id": "a", "key": SECRET[4:]}]}, "key must be 32 bytes in base64"),
        ({"*": [{"id": "a", "key": 7}]}, "key must be 32 bytes in base64"),
        ({"*": [{"id": "a", "key": SECRET}], "t": [{"id": "a", "key": SECRET}]}, "two keys with id 'a'"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_no_key_is_shown(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"encryption_keys: .*{says}") as found:
        Keyring(path)
    assert SECRET[4:] not in str(found.value)


def test_a_file_that_others_may_read_or_that_is_not_there_is_refused(file: Path, tmp_path: Path) -> None:
    assert os.stat(file).st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"encryption_keys: .*nobody else may read it: chmod 600"):
        Keyring(file)
    with pytest.raises(ConfigError, match=r"encryption_keys: cannot read .*: No such file"):
        Keyring(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="encryption_keys: needs data_dir"):
        KVStoreConfig(encryption_keys=file)


def test_the_commands_make_rotate_and_drop_keys(tmp_path: Path) -> None:
    path, run = tmp_path / "keys", CliRunner().invoke
    assert run(app, ["add-key", str(path)]).exit_code == 0
    assert run(app, ["add-key", str(path), "--tenant", "ours"]).exit_code == 0
    assert run(app, ["add-key", str(path), "--tenant", "ours"]).exit_code == 0
    rows = read_key_file(path)
    assert {tenant: len(keys) for tenant, keys in rows.items()} == {"*": 1, "ours": 2}
    answer = run(app, ["drop-keys", str(path), "--tenant", "ours"])
    assert all(key.id in answer.output for key in rows["ours"])
    assert list(read_key_file(path)) == ["*"]
    for tenant in ("*", "ours"):
        with pytest.raises(ConfigError, match=r"tenant: .* has no row that may go"):
            run(app, ["drop-keys", str(path), "--tenant", tenant], catch_exceptions=False)
