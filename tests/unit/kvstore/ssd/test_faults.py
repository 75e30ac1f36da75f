"""Devices that are full, broken or read-only; lives without syncs."""

import asyncio
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from moonpool.errors import ConfigError
from moonpool.kv.keys import BlockKey
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.ssd.full_device import told_by_lmdb
from services.kvstore.ssd.recovery import DataFolder
from services.kvstore.ssd.tier import SsdTier, open_tier
from tests.unit.kvstore.helpers import RECORD, Driven, data_of, keys_of, open_ssd, store, writing

KEYS = keys_of(12)


async def written(driven: Driven, *, retry_after_s: tuple[float, ...] = (0.0, 0.0)) -> WriteBehind:
    """Lets the writer thread do all there is to do."""
    async with writing(driven, retry_after_s=retry_after_s) as writer:
        assert await writer.drain(20)
    driven.store.check_invariants()
    return writer


def failing(times: int, error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    left = [times]

    def run(*args: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return real(*args, **named)

    return run


FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_INDEX = lmdb.DiskError("mdb_txn_commit: No space left on device")


@pytest.mark.parametrize(
    ("target", "error"), [("segments.SegmentFile.append", FULL), ("index.Index.commit", FULL_INDEX)]
)
async def test_a_full_device_is_tried_again_with_less_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, error: Exception
) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:4])
        for key in KEYS[:4]:
            driven.store.tiers.dram.discard(key)
        session = driven.put([KEYS[4]])
        real = getattr(__import__(f"services.kvstore.ssd.{target.split('.')[0]}", fromlist=["x"]), target.split(".")[1])
        with monkeypatch.context() as patch:
            name = target.split(".")[2]
            patch.setattr(real, name, failing(2, error, getattr(real, name)))
            writer = await written(driven)
        assert (writer.retries, driven.store.writes.failed_batches) == (2, 2)
        assert driven.durable[1:] == [(KEYS[4],)]
        assert driven.store.writes.blocks_not_durable == 0
        assert driven.removed[0] == KEYS[0]
        assert KEYS[3] in driven.store.tiers
        driven.store.writes.close(session)
    with store(tmp_path) as driven:
        assert {KEYS[3], KEYS[4]} <= set(driven.store.tiers)
        assert not set(driven.removed) & set(driven.store.tiers)


async def test_a_device_that_stays_full_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store(tmp_path) as driven:
        driven.put([KEYS[0]])
        with monkeypatch.context() as patch:
            patch.setattr("services.kvstore.ssd.segments.SegmentFile.append", failing(-1, FULL, print))
            writer = await written(driven)
        assert (writer.retries, driven.store.writes.failed_batches) == (2, 3)
        assert driven.store.writes.blocks_not_durable == 1
        assert driven.read([KEYS[0]]) == [data_of(KEYS[0])]
        driven.put([KEYS[1]])
        await written(driven)
        assert driven.durable == [(KEYS[1],)]


async def test_a_full_device_gives_up_as_much_as_a_batch_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:6])
        driven.store.writes.close(driven.put(KEYS[6:9]))
        with monkeypatch.context() as patch:
            real = __import__("services.kvstore.ssd.segments", fromlist=["x"]).SegmentFile
            patch.setattr(real, "append", failing(1, FULL, real.append))
            writer = await written(driven)
        assert writer.retries == 1
        backend = driven.store.tiers.ssd
        assert backend is not None
        assert isinstance(backend, SsdTier)
        assert set(backend) == set(KEYS[3:9])


async def test_a_device_that_stays_full_makes_nobody_wait_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store(tmp_path) as driven:
        backend = driven.store.tiers.ssd
        assert backend is not None
        writer = WriteBehind(driven.store.writes, backend, driven.signal, retry_after_s=(0.0, 0.0))
        task = asyncio.ensure_future(writer.run())
        with monkeypatch.context() as patch:
            patch.setattr("services.kvstore.ssd.segments.SegmentFile.append", failing(-1, FULL, print))
            for key in KEYS[:4]:
                driven.store.writes.close(driven.put([key]))
                assert await writer.drain(20)
        assert (writer.retries, driven.store.writes.failed_batches) == (2, 2 + 4)
        assert not backend.has_housekeeping
        task.cancel()
        await asyncio.wait({task})
        await writer.aclose()


async def test_trouble_is_told_once_a_while_and_its_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    caplog.set_level(logging.INFO)
    with store(tmp_path) as driven:
        backend = driven.store.tiers.ssd
        assert backend is not None
        writer = WriteBehind(driven.store.writes, backend, driven.signal, retry_after_s=(0.0,), clock=lambda: now)
        task = asyncio.ensure_future(writer.run())

        async def put(key: BlockKey, error: Exception | None) -> list[str]:
            """What is said while a block is put."""
            caplog.clear()
            with monkeypatch.context() as patch:
                if error is not None:
                    patch.setattr("services.kvstore.ssd.segments.SegmentFile.append", failing(-1, error, print))
                driven.store.writes.close(driven.put([key]))
                assert await writer.drain(20)
            return [
                record.getMessage() for record in caplog.records if record.name == "services.kvstore.operate.writer"
            ]

        def broken(name: str) -> OSError:
            return OSError(errno.EROFS, "Read-only file system", name)

        assert [len(await put(KEYS[n], broken(f"{n}.seg"))) for n in range(3)] == [1, 0, 0]
        now = 60.0
        assert "Read-only file system: '3.seg'" in (await put(KEYS[3], broken("3.seg")))[0]
        assert "durable again" in (await put(KEYS[4], None))[0]
        assert len(await put(KEYS[5], broken("5.seg"))) == 1
        assert len(await put(KEYS[6], FULL)) == 2  # tried again, and given up
        assert len(await put(KEYS[7], None)) == 1
        assert await put(KEYS[8], None) == []
        task.cancel()
        await asyncio.wait({task})
        await writer.aclose()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
async def test_a_broken_or_read_only_device_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:1])
        with monkeypatch.context() as patch:
            patch.setattr("services.kvstore.ssd.segments.SegmentFile.append", failing(-1, OSError(number, "no"), print))
            driven.put([KEYS[1]])
            with caplog.at_level(logging.ERROR):
                writer = await written(driven)
        assert (writer.retries, driven.store.writes.failed_batches) == (0, 1)
        assert "could not be made durable" in caplog.text
        assert driven.read(KEYS[:2]) == [data_of(key) for key in KEYS[:2]]
        assert driven.durable == [(KEYS[0],)]


async def test_a_plan_that_gets_nowhere_is_not_made_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store(tmp_path) as driven:
        backend = driven.store.tiers.ssd
        assert backend is not None
        driven.flush(KEYS[:3])
        backend._space.capacity_bytes = 2 * RECORD
        backend.protect(lambda *_: True)
        await written(driven)
        assert backend.has_housekeeping
        assert len(backend) == 3


@pytest.mark.parametrize(
    "target",
    ["lmdb.open", "services.kvstore.ssd.index.Index.commit", "services.kvstore.ssd.index.Index.finish_rebuild"],
)
def test_a_lost_index_waits_for_room_and_its_blocks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    """Whether it cannot be made, filled or finished."""
    with store(tmp_path, 2 * RECORD) as driven:
        driven.flush(KEYS[:5], "t")
    segments = [(file.name, file.read_bytes()) for file in sorted((tmp_path / "segments").iterdir())]
    for number in range(2):
        (tmp_path / "index" / "data.mdb").unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(target, failing(-1, FULL_INDEX, print))
            caplog.clear()
            with store(tmp_path, 2 * RECORD) as driven:
                here = KEYS[: 5 + number]
                assert [line for line in caplog.messages if "too full for an index" in line] == [
                    line for line in caplog.messages if str(tmp_path / "index") in line and "error" in line
                ]
                assert "free some room and start again" in caplog.text
                assert f"'needed_bytes': {48 * len(here) + (1 << 20)}" in caplog.text
                ssd = driven.store.tiers.ssd
                assert isinstance(ssd, SsdTier)
                assert not ssd.indexed
                assert not (tmp_path / "index").exists()
                assert {key: ssd.tenant_of(key) for key in ssd} == dict.fromkeys(here, "t")
                assert driven.read(KEYS) == [data_of(key) for key in here]
                files = [(file.name, file.read_bytes()) for file in sorted((tmp_path / "segments").iterdir())]
                assert files[: len(segments)] == segments
                driven.flush([KEYS[len(here)]], "t")  # where the data find room, blocks become durable all the same
                ssd.check_invariants()
    for rebuilt in (True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO), store(tmp_path, 2 * RECORD) as driven:
            assert ("rebuilding the index" in caplog.text) == rebuilt
            ssd = driven.store.tiers.ssd
            assert isinstance(ssd, SsdTier)
            assert ssd.indexed
            assert driven.read(KEYS) == [data_of(key) for key in KEYS[:7]]


def test_without_an_index_old_segments_make_room_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssd = open_ssd(tmp_path, 6 * RECORD, 2 * RECORD)
    Driven(ssd).flush(KEYS[:6])
    ssd.close()
    (tmp_path / "index" / "data.mdb").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("lmdb.open", failing(-1, FULL_INDEX, print))
        ssd = open_ssd(tmp_path, 6 * RECORD, 2 * RECORD)
    driven = Driven(ssd)
    for key in KEYS[6:10]:
        driven.flush([key])
    assert (set(ssd), ssd.used_bytes) == (set(KEYS[4:10]), 6 * RECORD)
    ssd.close()
    ssd = open_ssd(tmp_path, 6 * RECORD, 2 * RECORD)
    assert (set(ssd), ssd.indexed) == (set(KEYS[4:10]), True)
    ssd.close()


def test_a_first_start_needs_room_for_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdb.open", failing(-1, FULL_INDEX, print))
    with pytest.raises(ConfigError, match=r"data_dir: .* cannot be used: .*No space left"):
        open_tier(tmp_path, 1 << 20, RECORD)


@pytest.mark.parametrize(
    ("said", "probed", "heard"),
    [
        (lmdb.Error("mdb_txn_commit: Input/output error"), FULL, lmdb.DiskError),
        (lmdb.Error("mdb_txn_commit: Disk quota exceeded"), OSError(errno.EDQUOT, "quota"), lmdb.DiskError),
        (lmdb.Error("mdb_txn_commit: Input/output error"), OSError(errno.EIO, "broken"), lmdb.Error),
        (lmdb.Error("mdb_txn_commit: Input/output error"), None, lmdb.Error),
        (lmdb.MapFullError("mdb_put: MDB_MAP_FULL"), FULL, lmdb.MapFullError),
    ],
)
def test_what_lmdb_says_unclearly_is_looked_into(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: lmdb.Error,
    probed: OSError | None,
    heard: type[lmdb.Error],
) -> None:
    if probed is not None:
        monkeypatch.setattr(Path, "write_bytes", failing(-1, probed, print))
    with pytest.raises(lmdb.Error) as caught, told_by_lmdb(tmp_path):
        raise said
    assert type(caught.value) is heard
    assert list(tmp_path.iterdir()) == []


def test_a_store_whose_segments_hold_nothing_starts_on_a_full_device_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tier(tmp_path, 1 << 20, RECORD).close()
    (tmp_path / "index" / "data.mdb").unlink()
    (tmp_path / "segments" / "0000000000000001.seg").write_bytes(bytes(4096))
    with monkeypatch.context() as patch:
        patch.setattr("lmdb.open", failing(-1, FULL_INDEX, print))
        ssd = open_tier(tmp_path, 1 << 20, RECORD)
    assert (len(ssd), ssd.indexed) == (0, False)
    ssd.close()


def test_what_segments_have_lost_need_not_be_noted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:3])
    (tmp_path / "segments" / "0000000000000002.seg").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("services.kvstore.ssd.index.Index.commit", failing(-1, FULL_INDEX, print))
        with store(tmp_path) as driven:
            assert set(driven.store.tiers) == {KEYS[0], KEYS[2]}
    with store(tmp_path) as driven:
        driven.flush([KEYS[3]])
    with store(tmp_path) as driven:
        assert set(driven.store.tiers) == {KEYS[0], KEYS[2], KEYS[3]}


def test_where_lost_syncs_cannot_be_noted_there_are_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("services.kvstore.ssd.recovery.sync_folder", failing(-1, FULL, print))
        ssd = open_tier(tmp_path, 1 << 20, RECORD, durability="process")
    assert ssd.durability == "power"
    assert "durability is power" in caplog.text
    assert not (tmp_path / "unsynced").exists()
    ssd.close()


def test_a_life_without_syncs_is_believed_in_the_same_boot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = __import__("services.kvstore.ssd.segments", fromlist=["x"]).SegmentFile.sync

    def noting(file: Any) -> None:
        synced.append(file.path.name)
        real(file)

    monkeypatch.setattr("services.kvstore.ssd.segments.SegmentFile.sync", noting)
    for boot, rebuilt in (("one", True), ("one", False), ("two", True)):
        monkeypatch.setattr("services.kvstore.ssd.recovery.boot_id", lambda boot=boot: boot)
        ssd = open_tier(tmp_path, 1 << 20, 4 * RECORD, durability="process")
        driven = Driven(ssd)
        assert set(ssd) == set(driven.store.tiers)
        if boot == "one" and rebuilt:
            driven.flush(KEYS[:3])
        assert set(ssd) == set(KEYS[:3])
        assert synced == []
        assert (tmp_path / "unsynced").read_text() == boot
        ssd._index.close()  # and then the process ends
        ssd._folder.close()
    ssd = open_tier(tmp_path, 1 << 20, 4 * RECORD, durability="process")
    Driven(ssd).flush(KEYS[3:4])
    ssd.close()
    assert synced == ["0000000000000001.seg", "0000000000000002.seg"]  # the killed life's too
    assert not (tmp_path / "unsynced").exists()
    ssd = open_tier(tmp_path, 1 << 20, 4 * RECORD)
    assert set(ssd) == set(KEYS[:4])
    ssd.close()


def test_what_is_noted_already_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.ssd.recovery.boot_id", lambda: "one")
    folder = DataFolder(tmp_path)
    folder.leave_unsynced()
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.open", failing(-1, FULL, print))
        patch.setattr("services.kvstore.ssd.recovery.sync_folder", failing(-1, FULL, print))
        patch.setattr(DataFolder, "unsynced", lambda self: "one")
        folder.leave_unsynced()
    assert folder.unsynced() == "one"
    monkeypatch.setattr("services.kvstore.ssd.recovery.boot_id", lambda: "two")
    folder.leave_unsynced()
    assert folder.unsynced() == "two"
    folder.close()


def test_an_index_of_another_boot_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.kvstore.ssd.recovery.boot_id", lambda: "one")
    ssd = open_tier(tmp_path, 1 << 20, 4 * RECORD, durability="process")
    Driven(ssd).flush(KEYS[:3], "t")
    ssd._index.close()
    ssd._folder.close()
    monkeypatch.setattr("services.kvstore.ssd.recovery.boot_id", lambda: "two")
    with caplog.at_level(logging.INFO):
        ssd = open_tier(tmp_path, 1 << 20, 4 * RECORD)
    assert "the index is not believed" in caplog.text
    assert "segments read" in caplog.text
    assert {key: ssd.tenant_of(key) for key in ssd} == dict.fromkeys(KEYS[:3], "t")
    ssd.close()
