"""Which blocks go to the SSD tier when only those that are reused are admitted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moonpool.kvstore.eviction.retention import Pins
from moonpool.kvstore.ssd.admission import ADMIT_ALL, ADMIT_REUSED, SsdAdmission
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import (
    BLOCK,
    RECORD,
    Driven,
    data_of,
    info_of,
    keys_of,
    open_ssd,
    run_of,
    spec_of,
)

KEYS = keys_of(8)
A, B, C = KEYS[:3]


@contextmanager
def reusing(
    path: Path, dram_blocks: int = 8, files: FaultyFiles | None = None
) -> Iterator[tuple[Driven, SsdAdmission]]:
    pins = Pins(4 * BLOCK)
    ssd = open_ssd(path, 64 * RECORD, 4 * RECORD, pins=pins, admission=SsdAdmission(ADMIT_REUSED, pins), files=files)
    try:
        yield Driven(ssd, dram_bytes=dram_blocks * BLOCK, pins=pins), ssd.admission
    finally:
        ssd.close()


def on_ssd(driven: Driven) -> set[bytes]:
    return set(driven.store.tiers.catalogue)


def test_a_block_goes_to_ssd_with_its_first_use(tmp_path: Path) -> None:
    with reusing(tmp_path) as (driven, admission):
        driven.flush([A, B, C])
        assert on_ssd(driven) == set()
        assert (admission.refused_blocks, admission.refused_bytes) == (3, 3 * BLOCK)
        assert driven.read([A, B]) == [data_of(A), data_of(B)]
        driven.flush()
        assert on_ssd(driven) == {A, B}
        driven.flush([B, C])  # a writer brings them again
        assert on_ssd(driven) == {A, B, C}
        assert admission.refused_blocks == 3
    ssd = open_ssd(tmp_path)
    assert set(ssd.catalogue) == {A, B, C}
    ssd.close()


def test_a_block_that_comes_back_is_admitted(tmp_path: Path) -> None:
    with reusing(tmp_path, dram_blocks=2) as (driven, admission):
        for pair in (KEYS[:2], KEYS[2:4], KEYS[4:6]):
            driven.flush(pair)
        assert on_ssd(driven) == set()
        assert driven.removed == KEYS[1::-1] + KEYS[3:1:-1]
        driven.flush(KEYS[:2])
        assert on_ssd(driven) == set(KEYS[:2])
        assert set(admission.ghosts) == set(KEYS[2:6])


def test_pinned_blocks_are_admitted_whenever_they_are_pinned(tmp_path: Path) -> None:
    with reusing(tmp_path) as (driven, admission):
        driven.flush([A, B])
        assert driven.operations.pin("", "context", [A], 10).blocks == 1
        driven.flush()
        assert on_ssd(driven) == {A}
        assert admission.admits(info_of(A), 1)
        assert not admission.admits(info_of(C), 1)


def test_what_its_writer_waits_for_is_admitted(tmp_path: Path) -> None:
    """Present blocks too, and those that come in parts from several writers."""
    with reusing(tmp_path) as (driven, _):
        driven.flush([A])
        transfer = driven.open(spec_of([A, B], durable=True))
        assert transfer is not None
        assert list(transfer.present) == [0]
        for layer in range(3):
            driven.store.writes.write(transfer, [run_of(B, 1, layer)])
        driven.flush()
        assert driven.durable == [(A, B)]
        driven.store.writes.close(transfer)
        waits = driven.open(spec_of([C], durable=True))
        brings = driven.open(spec_of([C]))
        assert waits is not None
        assert brings is not None
        for layer in range(3):
            driven.store.writes.write(brings, [run_of(C, 0, layer)])
        driven.flush()
        assert C in on_ssd(driven)
        driven.store.writes.close(waits)
        driven.store.writes.close(brings)


def test_a_read_does_not_try_again_what_the_device_refused(tmp_path: Path) -> None:
    files = FaultyFiles()
    with reusing(tmp_path, files=files) as (driven, _):
        driven.flush([A])
        files.fail("write", OSError(5, "Input/output error"))
        assert driven.read([A]) == [data_of(A)]
        driven.flush()
        assert list(driven.store.writes.queue.unsaved) == [A]
        files.mend()
        assert driven.read([A]) == [data_of(A)]
        assert not driven.store.writes.queue.queued
        driven.store.writes.queue.retry()
        driven.flush()
        assert on_ssd(driven) == {A}


def test_as_many_refused_keys_are_remembered_as_the_tier_has_room_for() -> None:
    admission = SsdAdmission(ADMIT_REUSED)
    for key in KEYS:
        assert not admission.admits(info_of(key), 3)
    assert list(admission.ghosts) == KEYS[-3:]
    assert admission.admits(info_of(KEYS[-1]), 3)
    assert not admission.admits(info_of(KEYS[0]), 3)


def test_all_admits_all() -> None:
    admission = SsdAdmission(ADMIT_ALL)
    assert all(admission.admits(info_of(key), 1) for key in (A, A, B))
    assert admission.refused_blocks == 0
