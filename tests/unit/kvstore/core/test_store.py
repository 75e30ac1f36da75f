"""Transfers and visibility, driven by hand."""

import pytest

from moonpool.base.errors import FrameError, InvalidRequest, Overloaded
from moonpool.base.kv.frames import OpenedRun, SliceRun
from moonpool.kvstore.core.put_transfer import MAX_TRANSFER_BLOCKS, PutSpec
from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    LAYOUT,
    OTHER_FORMAT,
    Driven,
    data_of,
    held,
    keys_of,
    run_of,
    spec_of,
)
from tests.unit.kvstore.invariants import check

KEYS = keys_of(8)
A, B, C, D = KEYS[:4]


def test_nothing_incomplete_is_visible() -> None:
    driven = Driven()
    transfer = driven.open(spec_of([A, B]))
    assert transfer is not None
    writes = driven.store.writes
    for index, layer in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        assert driven.visible == []
        writes.write(transfer, [run_of(KEYS[index], index, layer)])
        check(driven.store)
    assert driven.visible == [(B,)]
    assert driven.stored == [B]
    assert driven.store.tiers.match([A]) == 0
    assert driven.read([A, B]) == []
    writes.write(transfer, [run_of(A, 0, 2)])
    assert driven.visible == [(B,), (A,)]
    assert transfer.complete
    assert driven.read([A, B]) == [data_of(A), data_of(B)]


def test_an_abandoned_transfer_leaves_nothing() -> None:
    driven = Driven()
    transfer = driven.open(spec_of([A, B]))
    assert transfer is not None
    for layer in range(LAYOUT.layers):
        driven.store.writes.write(transfer, [run_of(A, 0, layer)])
    driven.store.writes.write(transfer, [run_of(B, 1, 0)])
    assert driven.store.tiers.dram.reserved.total_bytes == BLOCK
    driven.store.writes.close(transfer)
    driven.store.writes.close(transfer)
    assert driven.store.tiers.dram.reserved.total_bytes == 0
    assert (len(driven.store.writes.transfers), len(driven.store.writes.unfinished)) == (0, 0)
    assert list(held(driven.store)) == [A]
    check(driven.store)


def test_existing_blocks_are_told_and_need_not_come() -> None:
    driven = Driven()
    driven.store.writes.close(driven.put([B]))
    transfer = driven.open(spec_of([A, B, C]))
    assert transfer is not None
    assert list(transfer.present) == [1]
    driven.store.writes.write(transfer, [run_of(B, 1, 0)])  # it may come all the same
    for index in (0, 2):
        for layer in range(LAYOUT.layers):
            driven.store.writes.write(transfer, [run_of(KEYS[index], index, layer)])
    assert transfer.complete
    assert driven.stored == [B, A, C]


def test_several_writers_share_a_block() -> None:
    driven = Driven()
    writes = driven.store.writes
    left = driven.open(spec_of([A], heads=range(1)))
    right = driven.open(spec_of([B, A], layers=range(3), heads=range(1, 2)))
    assert left is not None
    assert right is not None
    for layer in range(LAYOUT.layers):
        writes.write(left, [run_of(A, 0, layer, range(1))])
        check(driven.store)
        assert driven.visible == []
        assert driven.store.tiers.dram.reserved.total_bytes == BLOCK
        writes.write(right, [run_of(A, 1, layer, range(1, 2))])
    assert driven.visible == [(A,), (A,)]
    assert left.complete
    assert not right.complete
    assert driven.read([A]) == [data_of(A)]
    writes.close(left)
    writes.close(right)
    check(driven.store)


def test_two_whole_writers_of_one_block_and_one_leaves() -> None:
    driven = Driven()
    writes = driven.store.writes
    first, second = driven.open(spec_of([A])), driven.open(spec_of([A]))
    assert first is not None
    assert second is not None
    writes.write(first, [run_of(A, 0, 0)])
    writes.close(first)
    check(driven.store)
    for layer in range(LAYOUT.layers):
        writes.write(second, [run_of(A, 0, layer)])
    assert driven.visible == [(A,)]
    assert driven.read([A]) == [data_of(A)]


def test_a_transfer_is_told_when_another_finishes_its_block() -> None:
    driven = Driven()
    writes = driven.store.writes
    told: list[int] = []
    slow = writes.open(spec_of([A, B]), told.extend, lambda _: None, lambda: None)
    assert slow is not None
    writes.write(slow, [run_of(A, 0, 0)])
    writes.close(driven.put([A]))
    assert told == [0]
    assert set(slow.unfinished) == {1}
    writes.write(slow, [run_of(A, 0, 1)])  # it had sent this before it was told
    assert driven.store.tiers.dram.reserved.total_bytes == 0
    for layer in range(LAYOUT.layers):
        writes.write(slow, [run_of(B, 1, layer)])
    assert told == [0, 1]
    assert slow.complete
    assert driven.read([A, B]) == [data_of(A), data_of(B)]
    writes.close(slow)


def test_one_of_many_writers_vanishes_and_its_part_is_brought_by_another() -> None:
    driven = Driven()
    writes = driven.store.writes
    low, high = driven.open(spec_of([A], layers=range(2))), driven.open(spec_of([A], layers=range(2, 3)))
    assert low is not None
    assert high is not None
    writes.write(low, [run_of(A, 0, 0)])
    writes.close(low)  # vanishes; layer 0 stays as long as somebody writes the block
    writes.write(high, [run_of(A, 0, 2)])
    again = driven.open(spec_of([A], layers=range(1, 2)))
    assert again is not None
    check(driven.store)
    writes.write(again, [run_of(A, 0, 1)])
    assert driven.read([A]) == [data_of(A)]
    writes.close(high)
    writes.close(again)
    check(driven.store)


@pytest.mark.parametrize(
    "run",
    [
        SliceRun(0, 0, 1, 0, 2, 16),  # twice
        SliceRun(2, 0, 1, 0, 2, 16),  # a layer it did not declare
        SliceRun(1, 0, 1, 1, 2, 15),  # not full
        SliceRun(1, 1, 1, 0, 2, 16),  # no such block
        SliceRun(1, 0, 2, 0, 2, 16),  # more blocks than there are
    ],
)
def test_frames_outside_the_declaration_are_refused(run: SliceRun) -> None:
    driven = Driven()
    transfer = driven.open(spec_of([A], layers=range(2)))
    assert transfer is not None
    driven.store.writes.write(transfer, [run_of(A, 0, 0)])
    with pytest.raises(FrameError):
        driven.store.writes.write(
            transfer,
            [OpenedRun(run, memoryview(bytes(run.block_count * LAYOUT.slice_bytes(0))), [0] * run.block_count)],
        )
    driven.store.writes.close(transfer)
    check(driven.store)


def test_heads_outside_the_declaration_are_refused() -> None:
    driven = Driven()
    transfer = driven.open(spec_of([A], heads=range(1)))
    assert transfer is not None
    with pytest.raises(FrameError):
        driven.store.writes.write(transfer, [run_of(A, 0, 0)])


def test_wrong_declarations_name_their_field() -> None:
    def field(**changes: object) -> str:
        fields: dict[str, object] = {
            "format": FORMAT, "keys": [A], "parents": [B], "tenant": "", "layers": range(3), "heads": range(2),
        } | changes  # fmt: skip
        with pytest.raises(InvalidRequest) as refusal:
            PutSpec(**fields)  # type: ignore[arg-type]
        return refusal.value.field

    assert field(keys=[], parents=[]) == "keys"
    assert field(keys=[A, A], parents=[B, B]) == "keys"
    assert field(keys=keys_of(MAX_TRANSFER_BLOCKS + 1)) == "keys"
    assert field(parents=[B, C]) == "parent_keys"
    assert field(layers=range(2, 4)) == "layer_end"
    assert field(layers=range(2, 2)) == "layer_end"
    assert field(heads=range(3)) == "head_end"
    assert field(tenant="ü" * 600) == "tenant"


def test_a_key_has_one_format() -> None:
    driven = Driven()
    unfinished = driven.open(spec_of([A]))
    with pytest.raises(InvalidRequest, match="another format"):
        driven.open(spec_of([A], block_format=OTHER_FORMAT))
    assert unfinished is not None
    driven.store.writes.close(unfinished)
    driven.put([B])
    with pytest.raises(InvalidRequest, match="another format"):
        driven.open(spec_of([B], block_format=OTHER_FORMAT))
    lease = driven.store.reads.open([B], OTHER_FORMAT, promote=False)
    assert lease.blocks == 0


def test_transfers_are_bounded() -> None:
    driven = Driven()
    for key in KEYS[:4]:
        assert driven.open(spec_of([key])) is not None
        driven.store.reads.open([key], FORMAT, promote=False)
    with pytest.raises(Overloaded):
        driven.open(spec_of([KEYS[4]]))
    with pytest.raises(Overloaded):
        driven.store.reads.open([KEYS[4]], FORMAT, promote=False)
