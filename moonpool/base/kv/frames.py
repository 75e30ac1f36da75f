"""Frames: layer slices packed into payloads near one MiB, with a header checksum and a hash for every slice.

A frame with a whole read or put has a header made from a template (`FrameShape`), and is recognised by the checksum.
The slices come in one order, so packing and opening slice by slice would waste time.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from moonpool.base.errors import FrameError
from moonpool.base.kv.iovec import BytesLike, iovec_parts
from moonpool.base.kv.keys import key_bindings, layer_binding, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.v1 import kv_pb2

FRAME_BYTES = 1 << 20
"""Target payload size: with smaller frames gRPC's cost per message shows, larger frames block the event loop."""
MAX_FRAME_SLICES = 1024
"""Most slices in a frame, so that opening a frame is quick for any slice size."""
MAX_SHAPES = 64
"""That are kept."""


class SliceRun(NamedTuple):
    """Consecutive blocks in one layer, heads `[head_begin, head_end)` in shares (`KVLayout.head_shares`).

    Blocks are indices in the transfer's key list. `valid_tokens` counts the last block's; all others are full.
    """

    layer: int
    first_block: int
    block_count: int
    head_begin: int
    head_end: int
    valid_tokens: int


@dataclass(slots=True)
class Slice:
    """One layer slice to be sent, or some of the slice's heads.

    Attributes:
        layer: layer in the model.
        block: index in the transfer's key list.
        data: `part_bytes(layer, heads, layout)` bytes, which must stay as they are until sent.
        valid_tokens: the block's valid tokens.
        hash: `slice_hash` of the data with invalid token slots as zeros; bound where the transfer is a kvstore's.
        heads: consecutive shares of heads that `data` holds; None for the whole slice.
    """

    layer: int
    block: int
    data: memoryview
    valid_tokens: int
    hash: int
    heads: range | None = None


def part_bytes(layer: int, heads: range | None, layout: KVLayout) -> int:
    """Bytes for these head shares in this layer's slice; for the whole slice if None."""
    return layout.slice_bytes(layer) if heads is None else len(heads) * layout.share_bytes(layer)


class DamagedSliceError(FrameError):
    """A slice's bytes do not match the slice's hash.

    Attributes:
        block: index in the transfer's key list.
    """

    def __init__(self, layer: int, block: int) -> None:
        super().__init__(f"layer {layer} of block {block}: wrong hash")
        self.block = block


def checksum(header: kv_pb2.FrameHeader) -> int:
    """xxh3-64 of the header's other fields as little-endian integers: transfer, generation, runs, slice hashes."""
    return _checksum(header.transfer, header.generation, list(map(_run_of, header.runs)), header.slice_hashes)


def _checksum(transfer: int, generation: int, runs: Sequence[Sequence[int]], hashes: Sequence[int]) -> int:
    return checksum_of(transfer, generation, itertools.chain.from_iterable(runs), len(runs), hashes)


def checksum_of(transfer: int, generation: int, fields: Iterable[int], runs: int, hashes: Sequence[int]) -> int:
    """As `checksum`, for a header with `runs` runs; `fields` are the runs' fields, run after run."""
    return xxhash.xxh3_64_intdigest(_packing(runs, len(hashes)).pack(transfer, generation, *fields, *hashes))


@functools.lru_cache
def _packing(runs: int, hashes: int) -> struct.Struct:
    return struct.Struct(f"<QI{len(SliceRun._fields) * runs}I{hashes}Q")


def _run_of(message: kv_pb2.SliceRun) -> SliceRun:
    return SliceRun(
        message.layer,
        message.first_block,
        message.block_count,
        message.head_begin,
        message.head_end,
        message.valid_tokens,
    )


def pack_frames(
    transfer: int, generation: int, slices: Iterable[Slice], layout: KVLayout, target_bytes: int = FRAME_BYTES
) -> Iterator[tuple[kv_pb2.FrameHeader, list[memoryview]]]:
    """Pack slices into frames of at most `target_bytes`, in order; a layer's consecutive blocks form one run.

    A slice larger than `target_bytes` is split between head shares (a share is never split, even a large share). Token
    slots that are not valid are zeroed, in a copy. The payload's pieces otherwise refer to the slices' own memory.

    Args:
        transfer: The receiver's transfer.
        generation: The transfer's generation.
        slices: What to send; taken lazily.
        layout: Arrangement of the slices.
        target_bytes: Payload size aimed at.
    """
    frame = _Frame(layout)
    whole = layout.largest_slice_bytes <= target_bytes
    all_heads = range(layout.head_shares)
    for item in slices:
        data = _zero_invalid(item, layout)
        heads = all_heads if item.heads is None else item.heads
        pieces = ((heads.start, heads.stop, data),) if whole else _pieces(item.layer, data, heads, layout, target_bytes)
        for head_begin, head_end, piece in pieces:
            if frame.nbytes and (frame.nbytes + piece.nbytes > target_bytes or len(frame.hashes) == MAX_FRAME_SLICES):
                yield frame.finish(transfer, generation)
                frame = _Frame(layout)
            frame.add(item, head_begin, head_end, piece)
    if frame.nbytes:
        yield frame.finish(transfer, generation)


class OpenedRun(NamedTuple):
    """A run as received: all the transfer's heads, block after block, and a received hash per block."""

    run: SliceRun
    data: BytesLike
    hashes: Sequence[int]


class FrameOpener:
    """Opens one transfer's frames, in order.

    A slice part larger than a frame comes in several consecutive pieces, and is handed out whole.

    Attributes:
        unfinished_bytes: kept from a slice with only the first pieces arrived.
    """

    def __init__(self, layout: KVLayout, heads: range | None = None, keys: Sequence[bytes] | None = None) -> None:
        """Take what both sides know of the transfer.

        Args:
            layout: Arrangement of the slices.
            heads: Head shares that the transfer carries from each slice; None for all.
            keys: The transfer's blocks, where hashes are bound to them.
        """
        self._layout = layout
        self._heads = range(layout.head_shares) if heads is None else heads
        self._bindings = None if keys is None else key_bindings(keys)
        self._piece: tuple[SliceRun, bytearray] | None = None  # the beginning of a slice that comes in pieces
        self.unfinished_bytes = 0

    def open(self, header: kv_pb2.FrameHeader, payload: memoryview) -> list[tuple[SliceRun, memoryview, Sequence[int]]]:
        """Verify a frame; return the frame's whole runs with bytes, not copied except for slices in pieces.

        Raises:
            DamagedSliceError: A slice's bytes are not what was sent.
            FrameError: checksum, sizes or ranges are wrong; the frame must not be used.
        """
        opened = []
        for run, data, hashes in self.parse(header, payload):
            assert isinstance(data, memoryview), "parts of a payload in one piece are such"
            self._verify(run, data, self.unbound(run, hashes))
            opened.append((run, data, hashes))
        return opened

    def parse(self, header: kv_pb2.FrameHeader, payload: BytesLike) -> list[OpenedRun]:
        """As `open`, but without verifying slices: the copy verifies them (`moonpool.base.kv.native_copy`, `unbound`).

        Raises:
            FrameError: checksum, sizes or ranges are wrong; the frame must not be used.
        """
        transfer, messages, hashes = header.transfer, header.runs, header.slice_hashes[:]
        if not 0 < len(messages) <= len(hashes) <= MAX_FRAME_SLICES:
            raise FrameError(f"frame of transfer {transfer}: {len(messages)} runs, {len(hashes)} slices")
        runs = list(map(_run_of, messages))
        if _checksum(transfer, header.generation, runs, hashes) != header.checksum:
            raise FrameError(f"frame of transfer {transfer}: wrong checksum")
        sizes = [run_bytes(run, self._layout) for run in runs]
        if sum(sizes) != payload.nbytes or sum([run.block_count for run in runs]) != len(hashes):
            raise FrameError(f"frame of transfer {transfer}: {payload.nbytes} bytes, its runs need {sum(sizes)}")
        opened: list[OpenedRun] = []
        position = number = 0
        begin, end = self._heads.start, self._heads.stop
        for run, nbytes in zip(runs, sizes, strict=True):
            data, expected = payload[position : position + nbytes], hashes[number : number + run.block_count]
            position += nbytes
            number += run.block_count
            if run.head_begin != begin or run.head_end != end:
                whole = self._pieced(run, data)
                if whole is None:
                    continue
                run, data = whole
            opened.append(OpenedRun(run, data, expected))
        return opened

    def unbound(self, run: SliceRun, hashes: Sequence[int]) -> Sequence[int]:
        """Hashes of a run's own bytes, one per block, made from the received hashes.

        Raises:
            FrameError: The transfer has no such blocks.
        """
        bindings, first = self._bindings, run.first_block
        if bindings is None:
            return hashes
        if first + len(hashes) > len(bindings):
            raise FrameError(f"{run}: the transfer has {len(bindings)} blocks")
        layer = layer_binding(run.layer)
        return [
            value ^ layer ^ of_key for value, of_key in zip(hashes, bindings[first : first + len(hashes)], strict=True)
        ]

    def _pieced(self, run: SliceRun, data: BytesLike) -> tuple[SliceRun, memoryview] | None:
        """Take a piece of a slice; return the slice once whole."""
        start = run._replace(head_begin=self._heads.start, head_end=run.head_begin)
        before, buffer = self._piece or (start._replace(head_end=self._heads.start), bytearray())
        if before != start or run.block_count != 1 or run.head_end > self._heads.stop:
            raise FrameError(f"{run}: not expected (heads {self._heads}, behind {before})")
        for part in iovec_parts(data):
            buffer += part
        before = start._replace(head_end=run.head_end)
        whole = run.head_end == self._heads.stop
        self._piece = None if whole else (before, buffer)
        self.unfinished_bytes = 0 if whole else len(buffer)
        return (before, memoryview(buffer)) if whole else None

    def _verify(self, run: SliceRun, data: memoryview, expected: Sequence[int]) -> None:
        size, at = data.nbytes // len(expected), 0
        for block, value in enumerate(expected, run.first_block):
            if slice_hash(data[at : at + size]) != value:
                raise DamagedSliceError(run.layer, block)
            at += size


def whole_runs(header: kv_pb2.FrameHeader, nbytes: int, layout: KVLayout) -> list[tuple[SliceRun, list[int]]] | None:
    """Content of a frame with `nbytes` payload bytes and whole slices only: runs and their slices' hashes.

    None if `FrameOpener.open` must check the frame: some slices come in pieces, or an error is there.
    """
    runs, hashes = list(map(_run_of, header.runs)), list(header.slice_hashes)
    heads = all((run.head_begin, run.head_end) == (0, layout.head_shares) for run in runs)
    if not heads or len(hashes) > MAX_FRAME_SLICES or sum(run.block_count for run in runs) != len(hashes):
        return None
    if _checksum(header.transfer, header.generation, runs, hashes) != header.checksum:
        return None
    if not runs or not all(0 <= run.layer < layout.layers for run in runs):
        return None
    if sum([run.block_count * layout.slice_bytes(run.layer) for run in runs]) != nbytes:
        return None
    ends = itertools.accumulate((run.block_count for run in runs), initial=0)
    return [(run, hashes[begin : begin + run.block_count]) for run, begin in zip(runs, ends, strict=False)]


def run_bytes(run: SliceRun, layout: KVLayout) -> int:
    """Payload bytes of a run.

    Raises:
        FrameError: The run does not fit the layout.
    """
    layer, first_block, block_count, head_begin, head_end, valid_tokens = run
    if not (0 <= layer < layout.layers and block_count >= 1 and first_block >= 0):
        raise FrameError(f"{run}: no such layer or no blocks")
    if not 0 <= head_begin < head_end <= layout.head_shares:
        raise FrameError(f"{run}: no such heads")
    if not 1 <= valid_tokens <= layout.block_size:
        raise FrameError(f"{run}: no such number of valid tokens")
    if head_end - head_begin == layout.head_shares:
        return block_count * layout.slice_bytes(layer)
    return block_count * (head_end - head_begin) * layout.share_bytes(layer)


def split_run(run: SliceRun, data: memoryview, layout: KVLayout) -> Iterator[tuple[int, int, memoryview]]:
    """The parts of an opened run: (block index, byte offset in that block's layer slice, bytes to be put there)."""
    size = data.nbytes // run.block_count
    offset = run.head_begin * layout.share_bytes(run.layer)
    for index in range(run.block_count):
        yield run.first_block + index, offset, data[index * size : (index + 1) * size]


def _zero_invalid(item: Slice, layout: KVLayout) -> memoryview:
    """The slice's bytes, with invalid token slots zeroed in a copy where there are any."""
    assert item.data.nbytes == part_bytes(item.layer, item.heads, layout), "not the bytes of a slice or of its heads"
    if item.valid_tokens == layout.block_size:
        return item.data
    assert 1 <= item.valid_tokens < layout.block_size, "valid_tokens out of range"
    copy = memoryview(bytearray(item.data))
    layout.zero_invalid(item.layer, copy, item.valid_tokens)
    return copy


def _pieces(
    layer: int, data: memoryview, heads: range, layout: KVLayout, target_bytes: int
) -> Iterator[tuple[int, int, memoryview]]:
    """A slice's heads in pieces up to `target_bytes`, or one share each: (head_begin, head_end, bytes)."""
    share = layout.share_bytes(layer)
    step = max(1, target_bytes // share)
    for begin in range(heads.start, heads.stop, step):
        end = min(begin + step, heads.stop)
        yield begin, end, data[(begin - heads.start) * share : (end - heads.start) * share]


class _Frame:
    """A frame being filled."""

    __slots__ = ("_block_size", "_last", "_pieces", "_runs", "hashes", "nbytes")

    def __init__(self, layout: KVLayout) -> None:
        self._block_size = layout.block_size
        self._pieces: list[memoryview] = []
        self._runs: list[list[int]] = []  # a Run's fields, in order
        self._last = (-1, -1, -1, -1)  # what the next slice must be to lengthen the last run
        self.hashes: list[int] = []
        self.nbytes = 0

    def add(self, item: Slice, head_begin: int, head_end: int, piece: memoryview) -> None:
        self._pieces.append(piece)
        self.hashes.append(item.hash)
        self.nbytes += piece.nbytes
        layer, block, valid_tokens = item.layer, item.block, item.valid_tokens
        if self._last == (layer, block, head_begin, head_end):
            run = self._runs[-1]
            run[2] += 1
            run[5] = valid_tokens
        else:
            self._runs.append([layer, block, 1, head_begin, head_end, valid_tokens])
        after = block + 1 if valid_tokens == self._block_size else -1
        self._last = (layer, after, head_begin, head_end)

    def finish(self, transfer: int, generation: int) -> tuple[kv_pb2.FrameHeader, list[memoryview]]:
        header = kv_pb2.FrameHeader(
            transfer=transfer,
            generation=generation,
            slice_hashes=self.hashes,
            checksum=_checksum(transfer, generation, self._runs, self.hashes),
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


class FrameShape:
    """Headers for frames with all a transfer's full blocks, and some consecutive layers and heads from each.

    Attributes:
        cells: each slice's (layer, block), in order.
    """

    def __init__(self, layers: range, blocks: int, heads: range, block_size: int) -> None:
        runs = [SliceRun(layer, 0, blocks, heads.start, heads.stop, block_size) for layer in layers]
        self.cells = [(layer, block) for layer in layers for block in range(blocks)]
        self._of_layers = list(map(layer_binding, layers))
        self._fields = tuple(itertools.chain.from_iterable(runs))
        self._runs = len(runs)
        self._template = kv_pb2.FrameHeader()
        for run in runs:
            self._template.runs.add(**run._asdict())

    def header(self, transfer: int, generation: int, hashes: Sequence[int]) -> kv_pb2.FrameHeader:
        """A frame's header, with the slices' hashes in order."""
        header = kv_pb2.FrameHeader()
        header.CopyFrom(self._template)
        header.transfer = transfer
        if generation:
            header.generation = generation
        header.slice_hashes.extend(hashes)
        header.checksum = checksum_of(transfer, generation, self._fields, self._runs, hashes)
        return header

    def is_of(self, header: kv_pb2.FrameHeader) -> bool:
        """Whether a header has this shape."""
        return len(header.runs) == self._runs and header.checksum == checksum_of(
            header.transfer, header.generation, self._fields, self._runs, header.slice_hashes
        )

    def bindings(self, keys: Sequence[bytes]) -> list[int]:
        """Masks that are XORed to slices' hashes, to bind the hashes to blocks' keys and layers, or to unbind them."""
        of_keys = key_bindings(keys)
        return [of_key ^ of_layer for of_layer in self._of_layers for of_key in of_keys]


@functools.lru_cache(MAX_SHAPES)
def frame_shape(layers: range, blocks: int, heads: range, block_size: int) -> FrameShape:
    """The shape for frames with these layers and heads from `blocks` full blocks; kept, as few are in use."""
    return FrameShape(layers, blocks, heads, block_size)


def shape_of(
    header: kv_pb2.FrameHeader, layers: range, blocks: int, heads: range, block_size: int
) -> FrameShape | None:
    """The shape for a frame with all these slices; None if slices are missing or in another order.

    The header's runs are not read: the checksum was made for exactly these runs. If the runs differed nonetheless, the
    slices would lack the hashes bound to these blocks and layers.
    """
    slices = len(header.slice_hashes)
    if slices != len(layers) * blocks or slices > MAX_FRAME_SLICES:
        return None
    shape = frame_shape(layers, blocks, heads, block_size)
    return shape if shape.is_of(header) else None


def bind_all(hashes: Sequence[int], bindings: Sequence[int]) -> list[int]:
    """Hash bound to blocks and layers, or unbound from them (`FrameShape.bindings`)."""
    return list(map(operator.xor, hashes, bindings))
