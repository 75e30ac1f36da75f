"""Frames: packing, opening, and that nothing damaged is let through."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import FrameError
from moonpool.base.kv.frames import (
    MAX_FRAME_SLICES,
    DamagedSliceError,
    FrameOpener,
    Slice,
    SliceRun,
    checksum,
    pack_frames,
    part_bytes,
    run_bytes,
    split_run,
    whole_runs,
)
from moonpool.base.kv.keys import bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.v1 import kv_pb2
from tests.examples import examples
from tests.layouts import uniform_like
from tests.slices import slice_to_send

SMALL = settings(max_examples=examples(60), database=None)
LAYOUT = KVLayout.uniform(layers=4, kv_heads=4, head_dim=2, block_size=16, dtype="float16")
SLICE = LAYOUT.slice_bytes(0)  # 512
FULL = LAYOUT.block_size


def content(layer: int, block: int) -> bytes:
    return bytes((layer * 37 + block * 11 + i) % 251 + 1 for i in range(SLICE))


def slice_of(layer: int, block: int, valid_tokens: int = FULL, heads: range | None = None) -> Slice:
    data = memoryview(content(layer, block))
    if heads is not None:
        data = data[heads.start * LAYOUT.share_bytes(0) : heads.stop * LAYOUT.share_bytes(0)]
    return slice_to_send(LAYOUT, layer, block, data, valid_tokens, heads)


def pack(slices: Iterable[Slice], target: int, layout: KVLayout = LAYOUT) -> list[tuple[kv_pb2.FrameHeader, bytes]]:
    frames = pack_frames(9, 3, slices, layout, target)
    return [(header, b"".join(pieces)) for header, pieces in frames]


def opened(
    frames: list[tuple[kv_pb2.FrameHeader, bytes]], heads: range | None = None
) -> dict[tuple[int, int], bytearray]:
    """Everything in the frames, put together as a receiver does; each head once."""
    opener = FrameOpener(LAYOUT, heads)
    got: dict[tuple[int, int], bytearray] = {}
    seen: set[tuple[int, int, int]] = set()
    for header, payload in frames:
        for run, data, _ in opener.open(header, memoryview(payload)):
            for block, offset, piece in split_run(run, data, LAYOUT):
                got.setdefault((run.layer, block), bytearray(SLICE))[offset : offset + piece.nbytes] = piece
                cells = {(run.layer, block, head) for head in range(run.head_begin, run.head_end)}
                assert not seen & cells
                seen |= cells
    return got


def test_consecutive_blocks_form_a_run_and_small_slices_share_a_frame() -> None:
    slices = [slice_of(0, 0), slice_of(0, 1), slice_of(0, 3), slice_of(1, 4), slice_of(1, 5, 7)]
    ((header, payload),) = pack(slices, 1 << 20)
    assert (header.transfer, header.generation) == (9, 3)
    runs = [run for run, _, _ in FrameOpener(LAYOUT).open(header, memoryview(payload))]
    assert runs == [SliceRun(0, 0, 2, 0, 4, FULL), SliceRun(0, 3, 1, 0, 4, FULL), SliceRun(1, 4, 2, 0, 4, 7)]
    assert len(payload) == 5 * SLICE


def test_a_partial_block_ends_its_run() -> None:
    ((header, _),) = pack([slice_of(0, 0, 5), slice_of(0, 1)], 1 << 20)
    assert [(run.first_block, run.block_count, run.valid_tokens) for run in header.runs] == [(0, 1, 5), (1, 1, FULL)]


def test_frames_are_cut_at_the_target() -> None:
    frames = pack([slice_of(0, block) for block in range(5)], 2 * SLICE)
    assert [len(payload) for _, payload in frames] == [2 * SLICE, 2 * SLICE, SLICE]
    assert [header.runs[0].first_block for header, _ in frames] == [0, 2, 4]


def test_a_large_slice_is_split_between_heads() -> None:
    frames = pack([slice_of(2, 1)], LAYOUT.share_bytes(0) * 3)
    assert [[(r.head_begin, r.head_end) for r in header.runs] for header, _ in frames] == [[(0, 3)], [(3, 4)]]
    assert opened(frames) == {(2, 1): bytearray(content(2, 1))}
    assert len(pack([slice_of(2, 1)], 1)) == 4  # a head is never split


def test_some_heads_travel_as_whole_slices_do() -> None:
    heads = range(1, 3)
    slices = [slice_of(0, block, heads=heads) for block in range(5)]
    size = 2 * LAYOUT.share_bytes(0)
    assert part_bytes(0, heads, LAYOUT) == size
    frames = pack(slices, 3 * size)
    opener = FrameOpener(LAYOUT, heads)
    runs = [[run for run, _, _ in opener.open(header, memoryview(data))] for header, data in frames]
    assert runs == [[SliceRun(0, 0, 3, 1, 3, FULL)], [SliceRun(0, 3, 2, 1, 3, FULL)]]
    for (_, block), data in opened(frames, heads).items():
        assert data[LAYOUT.share_bytes(0) : LAYOUT.share_bytes(0) * 3] == slices[block].data
        assert not any(data[: LAYOUT.share_bytes(0)] + data[LAYOUT.share_bytes(0) * 3 :])


def test_large_parts_are_split_between_heads() -> None:
    frames = pack([slice_of(2, 1, heads=range(1, 4))], 2 * LAYOUT.share_bytes(0))
    assert [[(r.head_begin, r.head_end) for r in header.runs] for header, _ in frames] == [[(1, 3)], [(3, 4)]]
    ((header, _),) = pack([slice_of(2, 1, heads=range(2, 4))], 2 * LAYOUT.share_bytes(0))  # the whole would not fit
    assert [(r.head_begin, r.head_end) for r in header.runs] == [(2, 4)]


def test_other_heads_form_another_run() -> None:
    ((header, _),) = pack([slice_of(0, 0, heads=range(2)), slice_of(0, 1, heads=range(2, 4)), slice_of(0, 2)], 1 << 20)
    assert [(r.first_block, r.block_count, r.head_begin, r.head_end) for r in header.runs] == [
        (0, 1, 0, 2),
        (1, 1, 2, 4),
        (2, 1, 0, 4),
    ]


def test_a_part_must_have_its_heads_bytes() -> None:
    for item in (Slice(0, 0, memoryview(bytes(SLICE)), FULL, 0, range(2)), Slice(0, 0, memoryview(bytes(8)), FULL, 0)):
        with pytest.raises(AssertionError, match="heads"):
            pack([item], 1 << 20)


def test_invalid_slots_are_zeroed_in_a_copy() -> None:
    data = bytearray(content(1, 2))
    frames = pack([slice_to_send(LAYOUT, 1, 2, data, 5)], 1 << 20)
    assert bytes(data) == content(1, 2)
    expected = bytearray(data)
    LAYOUT.zero_invalid(0, memoryview(expected), 5)
    assert opened(frames) == {(1, 2): expected}
    assert expected != data


def test_full_slices_are_not_copied() -> None:
    item = slice_of(0, 0)
    ((_, pieces),) = pack_frames(1, 1, [item], LAYOUT)
    assert pieces[0].obj is item.data.obj


def test_nothing_makes_no_frame() -> None:
    assert pack([], 1 << 20) == []


@SMALL
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), unique=True, max_size=12),
    st.integers(1, 4 * SLICE),
    st.integers(1, FULL),
    st.sampled_from([None, *(range(begin, end) for begin in range(4) for end in range(begin + 1, 5))]),
)
def test_round_trip(cells: list[tuple[int, int]], target: int, last_valid: int, heads: range | None) -> None:
    slices = [slice_of(layer, block, last_valid if block == 6 else FULL, heads) for layer, block in cells]
    frames = pack(slices, target)
    assert all(len(payload) <= max(target, LAYOUT.share_bytes(0)) for _, payload in frames)
    expected = {}
    for item in slices:
        data = expected[item.layer, item.block] = bytearray(SLICE)
        begin = heads.start * LAYOUT.share_bytes(0) if heads else 0
        data[begin : begin + item.data.nbytes] = item.data
        LAYOUT.zero_invalid(0, memoryview(data), item.valid_tokens)
    assert opened(frames, heads) == expected


@SMALL
@given(st.integers(0, 3 * SLICE * 8 - 1))
def test_any_flipped_payload_bit_is_found(bit: int) -> None:
    ((header, payload),) = pack([slice_of(0, 0), slice_of(0, 1), slice_of(3, 1)], 1 << 20)
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedSliceError) as caught:
        FrameOpener(LAYOUT).open(header, memoryview(damaged))
    assert caught.value.block == [0, 1, 1][bit // 8 // SLICE]


def test_any_changed_header_field_is_found() -> None:
    ((header, payload),) = pack([slice_of(0, 0), slice_of(0, 1), slice_of(3, 1, 4)], 1 << 20)
    for field in ("transfer", "generation", "checksum"):
        changed = kv_pb2.FrameHeader()
        changed.CopyFrom(header)
        setattr(changed, field, getattr(header, field) ^ 1)
        with pytest.raises(FrameError):
            FrameOpener(LAYOUT).open(changed, memoryview(payload))
    for index in range(2):
        for field in ("layer", "first_block", "block_count", "head_begin", "head_end", "valid_tokens"):
            changed = kv_pb2.FrameHeader()
            changed.CopyFrom(header)
            setattr(changed.runs[index], field, getattr(header.runs[index], field) ^ 1)
            with pytest.raises(FrameError):
                FrameOpener(LAYOUT).open(changed, memoryview(payload))


@pytest.mark.parametrize(
    "run",
    [
        kv_pb2.SliceRun(layer=4, block_count=1, head_end=4, valid_tokens=16),
        kv_pb2.SliceRun(layer=0, block_count=0, head_end=4, valid_tokens=16),
        kv_pb2.SliceRun(layer=0, block_count=1, head_end=5, valid_tokens=16),
        kv_pb2.SliceRun(layer=0, block_count=1, head_begin=2, head_end=2, valid_tokens=16),
        kv_pb2.SliceRun(layer=0, block_count=1, head_end=4, valid_tokens=0),
        kv_pb2.SliceRun(layer=0, block_count=1, head_end=4, valid_tokens=17),
        kv_pb2.SliceRun(layer=0, block_count=2, head_end=4, valid_tokens=16),
    ],
)
def test_impossible_runs_are_refused_even_with_a_right_checksum(run: kv_pb2.SliceRun) -> None:
    payload = memoryview(bytes(SLICE))
    header = kv_pb2.FrameHeader(transfer=1, generation=1, runs=[run], slice_hashes=[slice_hash(payload)])
    header.checksum = checksum(header)
    with pytest.raises(FrameError):
        FrameOpener(LAYOUT).open(header, payload)


def test_an_empty_frame_is_refused() -> None:
    header = kv_pb2.FrameHeader(transfer=1)
    header.checksum = checksum(header)
    with pytest.raises(FrameError):
        FrameOpener(LAYOUT).open(header, memoryview(b""))


def test_heads_with_scales_travel_apart() -> None:
    """Some heads are one run of bytes with their scales, which is hashed and zeroed by itself."""
    layout = uniform_like(LAYOUT, dtype="int8")
    size = layout.share_bytes(0)
    assert size == 2 * FULL * (2 + 4)
    data = bytes(range(192)) * 4
    heads = range(1, 3)
    part = memoryview(data)[size : 3 * size]
    ((header, payload),) = pack([slice_to_send(layout, 0, 0, part, 5, heads)], 1 << 20, layout)
    ((run, received, hashes),) = FrameOpener(layout, heads).open(header, memoryview(payload))
    assert run == SliceRun(0, 0, 1, 1, 3, 5)
    whole = bytearray(data)
    layout.zero_invalid(0, memoryview(whole), 5)
    assert bytes(received) == whole[size : 3 * size]
    assert list(hashes) == [slice_hash(received)]
    ((_, offset, bytes_),) = split_run(run, received, layout)
    assert (offset, bytes_.nbytes) == (size, 2 * size)
    pieces = pack([slice_to_send(layout, 0, 0, data)], size, layout)
    assert [(header.runs[0].head_begin, header.runs[0].head_end) for header, _ in pieces] == [
        (h, h + 1) for h in range(4)
    ]


def test_checksum_golden() -> None:
    ((header, _),) = pack([slice_of(0, 0), slice_of(1, 0, 3)], 1 << 20)
    assert header.checksum == 0x8FD945009E574A8F


@pytest.mark.parametrize(("runs", "hashes"), [(2, 1), (1, 2), (5000, 5000), (0, 0)])
def test_a_frame_has_a_hash_for_every_slice_and_not_too_many(runs: int, hashes: int) -> None:
    run = kv_pb2.SliceRun(block_count=1, head_end=4, valid_tokens=FULL)
    header = kv_pb2.FrameHeader(transfer=9, runs=[run] * runs, slice_hashes=[0] * hashes)
    header.checksum = checksum(header)
    with pytest.raises(FrameError, match="frame of transfer 9"):
        FrameOpener(LAYOUT).open(header, memoryview(bytes(SLICE * runs)))


def test_a_hash_that_is_bound_to_another_block_or_layer_is_not_taken() -> None:
    keys = [bytes([index]) * 32 for index in range(2)]
    data = content(0, 0)
    for layer, key in ((0, keys[0]), (1, keys[0]), (0, keys[1])):
        item = dataclasses.replace(slice_to_send(LAYOUT, 0, 0, data), hash=bind(slice_hash(data), key, layer))
        ((header, payload),) = pack([item], 1 << 20)
        opener = FrameOpener(LAYOUT, keys=keys)
        if (layer, key) == (0, keys[0]):
            assert [hashes[0] for _, _, hashes in opener.open(header, memoryview(payload))] == [item.hash]
            continue
        with pytest.raises(DamagedSliceError):
            opener.open(header, memoryview(payload))


def test_pieces_of_a_slice_come_one_behind_the_other() -> None:
    first, second = pack([slice_of(2, 1)], LAYOUT.share_bytes(0) * 3)
    opener = FrameOpener(LAYOUT)
    with pytest.raises(FrameError, match="not expected"):
        opener.open(second[0], memoryview(second[1]))
    assert opener.open(first[0], memoryview(first[1])) == []
    with pytest.raises(FrameError, match="not expected"):
        opener.open(first[0], memoryview(first[1]))
    damaged = bytearray(second[1])
    damaged[0] ^= 1
    assert FrameOpener(LAYOUT).open(first[0], memoryview(first[1])) == []
    with pytest.raises(DamagedSliceError):
        opener.open(second[0], memoryview(damaged))


def test_a_sender_keeps_to_the_number_of_slices_in_a_frame() -> None:
    tiny = KVLayout.uniform(layers=2, kv_heads=1, head_dim=1, block_size=16, dtype="bfloat16")
    data = bytes(tiny.slice_bytes(0))
    slices = [slice_to_send(tiny, 0, 2 * block, data) for block in range(MAX_FRAME_SLICES + 1)]
    frames = pack(slices, 1 << 20, tiny)
    opened_runs = [FrameOpener(tiny).open(header, memoryview(payload)) for header, payload in frames]
    assert [len(runs) for runs in opened_runs] == [MAX_FRAME_SLICES, 1]


def test_a_frame_of_layers_that_the_layout_lacks_is_not_taken_whole() -> None:
    """Of a peer with more layers: right checksum, right size."""
    deeper = uniform_like(LAYOUT, layers=LAYOUT.layers + 1)
    for layer in range(deeper.layers):
        slices = [slice_to_send(deeper, layer, 0, memoryview(content(layer, 0)), FULL, None)]
        ((header, payload),) = pack(slices, 1 << 20, deeper)
        assert (whole_runs(header, len(payload), LAYOUT) is not None) == (layer < LAYOUT.layers)
    assert whole_runs(kv_pb2.FrameHeader(checksum=checksum(kv_pb2.FrameHeader())), 0, LAYOUT) is None


@pytest.mark.parametrize(("begin", "end"), [(1, 1), (0, 0), (3, 2), (0, 5), (-1, 2)])
def test_a_run_has_heads_of_its_layout(begin: int, end: int) -> None:
    with pytest.raises(FrameError, match="no such heads"):
        run_bytes(SliceRun(0, 0, 1, begin, end, FULL), LAYOUT)
