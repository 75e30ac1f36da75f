"""Frames: packing, opening, and that nothing damaged is let through."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import FrameError
from moonpool.kv.frames import (
    MAX_RUNS,
    MAX_SLICES,
    Run,
    Slice,
    checksum,
    open_frame,
    pack_frames,
    part_bytes,
    split_run,
)
from moonpool.kv.layout import KVLayout
from moonpool.v1 import kv_pb2

SMALL = settings(max_examples=60, derandomize=True, deadline=None, database=None)
LAYOUT = KVLayout(layers=4, kv_heads=4, head_dim=2, block_tokens=16, dtype="float16")
SLICE = LAYOUT.slice_bytes  # 512
FULL = LAYOUT.block_tokens


def content(layer: int, block: int) -> bytes:
    return bytes((layer * 37 + block * 11 + i) % 251 + 1 for i in range(SLICE))


def slice_of(layer: int, block: int, valid_tokens: int = FULL, heads: range | None = None) -> Slice:
    data = memoryview(content(layer, block))
    if heads is not None:
        data = data[heads.start * LAYOUT.head_bytes : heads.stop * LAYOUT.head_bytes]
    return Slice(layer, block, data, valid_tokens, heads)


def pack(slices: Iterable[Slice], target: int, layout: KVLayout = LAYOUT) -> list[tuple[kv_pb2.FrameHeader, bytes]]:
    frames = pack_frames(9, 3, slices, layout, target)
    return [(header, b"".join(pieces)) for header, pieces in frames]


def opened(frames: list[tuple[kv_pb2.FrameHeader, bytes]]) -> dict[tuple[int, int], bytearray]:
    """Everything in the frames, put together as a receiver does; each head once."""
    got: dict[tuple[int, int], bytearray] = {}
    seen: set[tuple[int, int, int]] = set()
    for header, payload in frames:
        for run, data in open_frame(header, memoryview(payload), LAYOUT):
            for block, offset, piece in split_run(run, data, LAYOUT):
                got.setdefault((run.layer, block), bytearray(SLICE))[offset : offset + piece.nbytes] = piece
                cells = {(run.layer, block, head) for head in range(run.head_begin, run.head_end)}
                assert not seen & cells
                seen |= cells
    return got


def test_consecutive_blocks_form_a_run_and_small_slices_share_a_frame() -> None:
    slices = [slice_of(0, 0), slice_of(0, 1), slice_of(0, 3), slice_of(1, 4), slice_of(1, 5, 7)]
    ((header, payload),) = pack(slices, 1 << 20)
    assert (header.session, header.generation) == (9, 3)
    runs = [run for run, _ in open_frame(header, memoryview(payload), LAYOUT)]
    assert runs == [Run(0, 0, 2, 0, 4, FULL), Run(0, 3, 1, 0, 4, FULL), Run(1, 4, 2, 0, 4, 7)]
    assert len(payload) == 5 * SLICE


def test_a_partial_block_ends_its_run() -> None:
    ((header, _),) = pack([slice_of(0, 0, 5), slice_of(0, 1)], 1 << 20)
    assert [(run.first_block, run.block_count, run.valid_tokens) for run in header.runs] == [(0, 1, 5), (1, 1, FULL)]


def test_frames_are_cut_at_the_target() -> None:
    frames = pack([slice_of(0, block) for block in range(5)], 2 * SLICE)
    assert [len(payload) for _, payload in frames] == [2 * SLICE, 2 * SLICE, SLICE]
    assert [header.runs[0].first_block for header, _ in frames] == [0, 2, 4]


def test_a_large_slice_is_split_between_heads() -> None:
    frames = pack([slice_of(2, 1)], LAYOUT.head_bytes * 3)
    assert [[(r.head_begin, r.head_end) for r in header.runs] for header, _ in frames] == [[(0, 3)], [(3, 4)]]
    assert opened(frames) == {(2, 1): bytearray(content(2, 1))}
    assert len(pack([slice_of(2, 1)], 1)) == 4  # a head is never split


def test_some_heads_travel_as_whole_slices_do() -> None:
    heads = range(1, 3)
    slices = [slice_of(0, block, heads=heads) for block in range(5)]
    size = 2 * LAYOUT.head_bytes
    assert part_bytes(heads, LAYOUT) == size
    frames = pack(slices, 3 * size)
    runs = [[run for run, _ in open_frame(header, memoryview(data), LAYOUT)] for header, data in frames]
    assert runs == [[Run(0, 0, 3, 1, 3, FULL)], [Run(0, 3, 2, 1, 3, FULL)]]
    for (_, block), data in opened(frames).items():
        assert data[LAYOUT.head_bytes : LAYOUT.head_bytes * 3] == slices[block].data
        assert not any(data[: LAYOUT.head_bytes] + data[LAYOUT.head_bytes * 3 :])


def test_large_parts_are_split_between_heads() -> None:
    frames = pack([slice_of(2, 1, heads=range(1, 4))], 2 * LAYOUT.head_bytes)
    assert [[(r.head_begin, r.head_end) for r in header.runs] for header, _ in frames] == [[(1, 3)], [(3, 4)]]
    ((header, _),) = pack([slice_of(2, 1, heads=range(2, 4))], 2 * LAYOUT.head_bytes)  # the whole would not fit
    assert [(r.head_begin, r.head_end) for r in header.runs] == [(2, 4)]


def test_other_heads_form_another_run() -> None:
    ((header, _),) = pack([slice_of(0, 0, heads=range(2)), slice_of(0, 1, heads=range(2, 4)), slice_of(0, 2)], 1 << 20)
    assert [(r.first_block, r.block_count, r.head_begin, r.head_end) for r in header.runs] == [
        (0, 1, 0, 2),
        (1, 1, 2, 4),
        (2, 1, 0, 4),
    ]


def test_a_part_must_have_its_heads_bytes() -> None:
    for item in (Slice(0, 0, memoryview(bytes(SLICE)), FULL, range(2)), Slice(0, 0, memoryview(bytes(8)), FULL)):
        with pytest.raises(AssertionError, match="heads"):
            pack([item], 1 << 20)
    scaled = dataclasses.replace(LAYOUT, scale_bytes=16)
    with pytest.raises(AssertionError, match="whole"):
        pack([slice_of(0, 0, heads=range(2))], 1 << 20, scaled)


def test_invalid_slots_are_zeroed_in_a_copy() -> None:
    data = bytearray(content(1, 2))
    frames = pack([Slice(1, 2, memoryview(data), 5)], 1 << 20)
    assert bytes(data) == content(1, 2)
    expected = bytearray(data)
    LAYOUT.zero_invalid(memoryview(expected), 5)
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
    assert all(len(payload) <= max(target, LAYOUT.head_bytes) for _, payload in frames)
    expected = {}
    for item in slices:
        data = expected[item.layer, item.block] = bytearray(SLICE)
        begin = heads.start * LAYOUT.head_bytes if heads else 0
        data[begin : begin + item.data.nbytes] = item.data
        LAYOUT.zero_invalid(memoryview(data), item.valid_tokens)
    assert opened(frames) == expected


@SMALL
@given(st.integers(0, 3 * SLICE * 8 - 1))
def test_any_flipped_payload_bit_is_found(bit: int) -> None:
    ((header, payload),) = pack([slice_of(0, 0), slice_of(0, 1), slice_of(3, 1)], 1 << 20)
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError, match="checksum"):
        open_frame(header, memoryview(damaged), LAYOUT)


def test_any_changed_header_field_is_found() -> None:
    ((header, payload),) = pack([slice_of(0, 0), slice_of(0, 1), slice_of(3, 1, 4)], 1 << 20)
    for field in ("session", "generation", "checksum"):
        changed = kv_pb2.FrameHeader()
        changed.CopyFrom(header)
        setattr(changed, field, getattr(header, field) ^ 1)
        with pytest.raises(FrameError):
            open_frame(changed, memoryview(payload), LAYOUT)
    for index in range(2):
        for field in ("layer", "first_block", "block_count", "head_begin", "head_end", "valid_tokens"):
            changed = kv_pb2.FrameHeader()
            changed.CopyFrom(header)
            setattr(changed.runs[index], field, getattr(header.runs[index], field) ^ 1)
            with pytest.raises(FrameError):
                open_frame(changed, memoryview(payload), LAYOUT)


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
    header = kv_pb2.FrameHeader(session=1, generation=1, runs=[run])
    header.checksum = checksum(header, (payload,))
    with pytest.raises(FrameError):
        open_frame(header, payload, LAYOUT)


def test_an_empty_frame_is_refused() -> None:
    header = kv_pb2.FrameHeader(session=1)
    header.checksum = checksum(header, ())
    with pytest.raises(FrameError):
        open_frame(header, memoryview(b""), LAYOUT)


def test_scaled_slices_travel_whole() -> None:
    layout = dataclasses.replace(LAYOUT, scale_bytes=16)
    item = Slice(0, 0, memoryview(bytes(range(256)) * 2 + bytes(16)), FULL)
    ((header, payload),) = pack([item], 100, layout)
    ((run, data),) = open_frame(header, memoryview(payload), layout)
    assert run == Run(0, 0, 1, 0, 4, FULL)
    assert data.nbytes == layout.slice_bytes
    header.runs[0].head_end = 2
    header.checksum = checksum(header, (memoryview(payload),))
    with pytest.raises(FrameError, match="whole"):
        open_frame(header, memoryview(payload), layout)


def test_checksum_golden() -> None:
    ((header, _),) = pack([slice_of(0, 0), slice_of(1, 0, 3)], 1 << 20)
    assert header.checksum == 0x6395BC4A11C46CF7


def test_only_as_many_runs_are_looked_at_as_the_payload_holds() -> None:
    """A header may claim any number; the second of these two would be refused for its layer."""
    runs = [kv_pb2.SliceRun(block_count=1, head_end=4, valid_tokens=FULL), kv_pb2.SliceRun(layer=99)]
    with pytest.raises(FrameError, match=f"5 bytes, its runs need {SLICE}"):
        open_frame(kv_pb2.FrameHeader(session=9, runs=runs), memoryview(bytes(5)), LAYOUT)


def test_a_frame_has_so_many_slices_and_runs_and_no_more() -> None:
    tiny = KVLayout(layers=2, kv_heads=1, head_dim=1, block_tokens=16, dtype="bfloat16")
    data = memoryview(bytes(tiny.slice_bytes))
    together = [Slice(0, block, data, FULL) for block in range(MAX_SLICES + 1)]
    apart = [Slice(0, 2 * block, data, FULL) for block in range(MAX_RUNS + 1)]
    for slices, most in ((together, MAX_SLICES), (apart, MAX_RUNS)):
        frames = pack(slices, 1 << 20, tiny)
        opened_runs = [open_frame(header, memoryview(payload), tiny) for header, payload in frames]
        assert [sum(run.block_count for run, _ in runs) for runs in opened_runs] == [most, 1]


@pytest.mark.parametrize("runs", [[(MAX_SLICES + 1)], [1] * (MAX_RUNS + 1)])
def test_a_frame_of_too_many_slices_or_runs_is_refused(runs: list[int]) -> None:
    tiny = KVLayout(layers=2, kv_heads=1, head_dim=1, block_tokens=16, dtype="bfloat16")
    payload = memoryview(bytes(sum(runs) * tiny.slice_bytes))
    header = kv_pb2.FrameHeader(
        runs=[kv_pb2.SliceRun(block_count=blocks, head_end=1, valid_tokens=FULL) for blocks in runs]
    )
    header.checksum = checksum(header, (payload,))
    with pytest.raises(FrameError, match="at most"):
        open_frame(header, payload, tiny)
