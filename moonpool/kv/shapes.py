"""Frames that bring a whole read or a whole put: their headers are made from a template, and known by their checksum.

All of it is there in one order, layer after layer and in each block after block; so the header's runs say nothing that
the session has not said before. Packing and opening them slice by slice (frames.py) would cost more than the bytes.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

from moonpool.kv.frames import MAX_FRAME_SLICES, Run, checksum_of
from moonpool.kv.hashes import key_bindings, layer_binding
from moonpool.v1 import kv_pb2

MAX_SHAPES = 64
"""That are kept."""


class FrameShape:
    """Headers of frames with all full blocks of a session, some consecutive layers and heads of each.

    Attributes:
        cells: (layer, block) of each slice, in order.
    """

    def __init__(self, layers: range, blocks: int, heads: range, block_tokens: int) -> None:
        runs = [Run(layer, 0, blocks, heads.start, heads.stop, block_tokens) for layer in layers]
        self.cells = [(layer, block) for layer in layers for block in range(blocks)]
        self._of_layers = list(map(layer_binding, layers))
        self._fields = tuple(itertools.chain.from_iterable(runs))
        self._runs = len(runs)
        self._template = kv_pb2.FrameHeader()
        for run in runs:
            self._template.runs.add(**run._asdict())

    def header(self, session: int, generation: int, hashes: Sequence[int]) -> kv_pb2.FrameHeader:
        """A frame's header, with the hashes of its slices in their order."""
        header = kv_pb2.FrameHeader()
        header.CopyFrom(self._template)
        header.session = session
        if generation:
            header.generation = generation
        header.slice_hashes.extend(hashes)
        header.checksum = checksum_of(session, generation, self._fields, self._runs, hashes)
        return header

    def is_of(self, header: kv_pb2.FrameHeader) -> bool:
        """Whether a header is one of these."""
        return len(header.runs) == self._runs and header.checksum == checksum_of(
            header.session, header.generation, self._fields, self._runs, header.slice_hashes
        )

    def bindings(self, keys: Sequence[bytes]) -> list[int]:
        """What is XORed to the slices' hashes to bind them to their blocks' keys and their layers, or unbind them."""
        of_keys = key_bindings(keys)
        return [of_key ^ of_layer for of_layer in self._of_layers for of_key in of_keys]


@functools.lru_cache(MAX_SHAPES)
def frame_shape(layers: range, blocks: int, heads: range, block_tokens: int) -> FrameShape:
    """The shape of frames with these layers and heads of so many full blocks; kept, as few are in use."""
    return FrameShape(layers, blocks, heads, block_tokens)


def shape_of(
    header: kv_pb2.FrameHeader, layers: range, blocks: int, heads: range, block_tokens: int
) -> FrameShape | None:
    """The shape of a frame that has all of these slices; None when it has not, or in another order.

    The header's runs are not looked at: they are those for which its checksum was made. Were they others all the same,
    the slices would not have the hashes that are bound to these blocks and layers.
    """
    slices = len(header.slice_hashes)
    if slices != len(layers) * blocks or slices > MAX_FRAME_SLICES:
        return None
    shape = frame_shape(layers, blocks, heads, block_tokens)
    return shape if shape.is_of(header) else None


def bound(hashes: Sequence[int], bindings: Sequence[int]) -> list[int]:
    """Hashes bound to blocks and layers, or unbound from them (`FrameShape.bindings`)."""
    return list(map(operator.xor, hashes, bindings))
