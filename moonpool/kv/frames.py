"""Frames: layer slices packed into payloads near one MiB, each with a checksum over all that it says."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from moonpool.errors import FrameError
from moonpool.kv.layout import KVLayout
from moonpool.v1 import kv_pb2

FRAME_BYTES = 1 << 20
"""Payload size aimed at: below it gRPC's cost per message shows, above it messages block the event loop."""
MAX_RUNS = 1024
MAX_SLICES = 2048
"""Bounds of one frame: each run and each slice costs its receiver some time, however small they are."""

_HEADER = struct.Struct("<QI")
_RUN = struct.Struct("<6I")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one layer, heads `[head_begin, head_end)`.

    Blocks are indices in the session's key list. `valid_tokens` counts the last block's; all others are full.
    """

    layer: int
    first_block: int
    block_count: int
    head_begin: int
    head_end: int
    valid_tokens: int


@dataclass(slots=True)
class Slice:
    """One layer slice to be sent, or some of its heads.

    Attributes:
        layer: of the model.
        block: index in the session's key list.
        data: `part_bytes(heads, layout)` bytes, which must stay as they are until sent.
        valid_tokens: of the block.
        heads: consecutive heads that `data` holds; None for the whole slice, as those with scales must travel.
    """

    layer: int
    block: int
    data: memoryview
    valid_tokens: int
    heads: range | None = None


def part_bytes(heads: range | None, layout: KVLayout) -> int:
    """Bytes of these heads of one layer slice; of all of it if None."""
    return layout.slice_bytes if heads is None else len(heads) * layout.head_bytes


def checksum(header: kv_pb2.FrameHeader, pieces: Sequence[memoryview]) -> int:
    """xxh3-64 of the payload, seeded with the xxh3-64 of the header's other fields as little-endian integers."""
    runs = (
        (run.layer, run.first_block, run.block_count, run.head_begin, run.head_end, run.valid_tokens)
        for run in header.runs
    )
    return _checksum(header.session, header.generation, runs, pieces)


def _checksum(session: int, generation: int, runs: Iterable[Sequence[int]], pieces: Sequence[memoryview]) -> int:
    packed = [_HEADER.pack(session, generation)]
    packed += [_RUN.pack(*run) for run in runs]
    seed = xxhash.xxh3_64_intdigest(b"".join(packed))
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0], seed)
    digest = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def pack_frames(
    session: int, generation: int, slices: Iterable[Slice], layout: KVLayout, target_bytes: int = FRAME_BYTES
) -> Iterator[tuple[kv_pb2.FrameHeader, list[memoryview]]]:
    """Packs slices into frames of at most `target_bytes`, in order; consecutive blocks of a layer form one run.

    What is larger than `target_bytes` is split between heads (one head is never split, whatever its size). Token slots
    that are not valid are zeroed, in a copy. The payload's pieces otherwise refer to the slices' own memory.

    Args:
        session: The receiver's session.
        generation: The session's generation.
        slices: What to send; taken lazily.
        layout: Arrangement of the slices.
        target_bytes: Payload size aimed at.
    """
    frame = _Frame(layout)
    whole = layout.slice_bytes <= target_bytes or layout.scale_bytes > 0
    all_heads = range(layout.kv_heads)
    for item in slices:
        data = _cleaned(item, layout)
        heads = all_heads if item.heads is None else item.heads
        pieces = ((heads.start, heads.stop, data),) if whole else _pieces(data, heads, layout, target_bytes)
        for head_begin, head_end, piece in pieces:
            if frame.nbytes and (frame.nbytes + piece.nbytes > target_bytes or frame.full):
                yield frame.finish(session, generation)
                frame = _Frame(layout)
            frame.add(item, head_begin, head_end, piece)
    if frame.nbytes:
        yield frame.finish(session, generation)


def open_frame(header: kv_pb2.FrameHeader, payload: memoryview, layout: KVLayout) -> list[tuple[Run, memoryview]]:
    """Verifies a received frame; returns its runs with their bytes, block after block, without copying.

    Raises:
        FrameError: Checksum, sizes or ranges are wrong; nothing of the frame may be used.
    """
    if len(header.runs) > MAX_RUNS:
        raise FrameError(f"frame of session {header.session}: {len(header.runs)} runs, {MAX_RUNS} at most")
    runs: list[tuple[Run, memoryview]] = []
    position = slices = 0
    for message in header.runs:
        run = Run(
            message.layer,
            message.first_block,
            message.block_count,
            message.head_begin,
            message.head_end,
            message.valid_tokens,
        )
        end = position + run_bytes(run, layout)
        runs.append((run, payload[position:end]))
        position = end
        slices += run.block_count
        if position > payload.nbytes:
            break
    if position != payload.nbytes or not runs:
        raise FrameError(f"frame of session {header.session}: {payload.nbytes} bytes, its runs need {position}")
    if slices > MAX_SLICES:
        raise FrameError(f"frame of session {header.session}: {slices} slices, {MAX_SLICES} at most")
    if checksum(header, (payload,)) != header.checksum:
        raise FrameError(f"frame of session {header.session}: wrong checksum")
    return runs


def run_bytes(run: Run, layout: KVLayout) -> int:
    """Payload bytes of a run.

    Raises:
        FrameError: The run does not fit the layout.
    """
    if not (0 <= run.layer < layout.layers and run.block_count >= 1 and run.first_block >= 0):
        raise FrameError(f"{run}: no such layer or no blocks")
    if not 0 <= run.head_begin < run.head_end <= layout.kv_heads:
        raise FrameError(f"{run}: no such heads")
    if not 1 <= run.valid_tokens <= layout.block_tokens:
        raise FrameError(f"{run}: no such number of valid tokens")
    heads = run.head_end - run.head_begin
    if heads == layout.kv_heads:
        return run.block_count * layout.slice_bytes
    if layout.scale_bytes:
        raise FrameError(f"{run}: slices with scales travel whole")
    return run.block_count * heads * layout.head_bytes


def split_run(run: Run, data: memoryview, layout: KVLayout) -> Iterator[tuple[int, int, memoryview]]:
    """The parts of an opened run: (block index, byte offset in that block's layer slice, bytes to be put there)."""
    size = data.nbytes // run.block_count
    offset = run.head_begin * layout.head_bytes
    for index in range(run.block_count):
        yield run.first_block + index, offset, data[index * size : (index + 1) * size]


def _cleaned(item: Slice, layout: KVLayout) -> memoryview:
    """The slice's bytes, with invalid token slots zeroed in a copy where there are any."""
    assert item.data.nbytes == part_bytes(item.heads, layout), "not the bytes of a layer slice or of its heads"
    assert item.heads is None or not layout.scale_bytes, "slices with scales travel whole"
    assert 1 <= item.valid_tokens <= layout.block_tokens, "valid_tokens out of range"
    if item.valid_tokens == layout.block_tokens:
        return item.data
    copy = memoryview(bytearray(item.data))
    narrow = layout if item.heads is None else replace(layout, kv_heads=len(item.heads))
    narrow.zero_invalid(copy, item.valid_tokens)
    return copy


def _pieces(
    data: memoryview, heads: range, layout: KVLayout, target_bytes: int
) -> Iterator[tuple[int, int, memoryview]]:
    """Some heads of a slice in pieces of at most `target_bytes`, or of one head: (head_begin, head_end, bytes)."""
    step = max(1, target_bytes // layout.head_bytes)
    for begin in range(heads.start, heads.stop, step):
        end = min(begin + step, heads.stop)
        offset = (begin - heads.start) * layout.head_bytes
        yield begin, end, data[offset : offset + (end - begin) * layout.head_bytes]


class _Frame:
    """A frame being filled."""

    __slots__ = ("_layout", "_pieces", "_runs", "nbytes")

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._pieces: list[memoryview] = []
        self._runs: list[list[int]] = []  # fields of a Run, in its order
        self.nbytes = 0

    @property
    def full(self) -> bool:
        return len(self._runs) >= MAX_RUNS or len(self._pieces) >= MAX_SLICES

    def add(self, item: Slice, head_begin: int, head_end: int, piece: memoryview) -> None:
        self._pieces.append(piece)
        self.nbytes += piece.nbytes
        if self._runs:
            last = self._runs[-1]
            layer, first_block, block_count, begin, end, valid_tokens = last
            if (
                layer == item.layer
                and first_block + block_count == item.block
                and valid_tokens == self._layout.block_tokens
                and begin == head_begin
                and end == head_end
            ):
                last[2] = block_count + 1
                last[5] = item.valid_tokens
                return
        self._runs.append([item.layer, item.block, 1, head_begin, head_end, item.valid_tokens])

    def finish(self, session: int, generation: int) -> tuple[kv_pb2.FrameHeader, list[memoryview]]:
        header = kv_pb2.FrameHeader(
            session=session,
            generation=generation,
            checksum=_checksum(session, generation, self._runs, self._pieces),
        )
        for layer, first_block, block_count, head_begin, head_end, valid_tokens in self._runs:
            header.runs.add(
                layer=layer,
                first_block=first_block,
                block_count=block_count,
                head_begin=head_begin,
                head_end=head_end,
                valid_tokens=valid_tokens,
            )
        return header, self._pieces
