"""Blocks that come whole, all of a session in one frame with its opening: the usual way of a few small blocks.

They need no session: no unfinished blocks, no record of what has come, nobody to be told but their writer. What finds
no room, or would take long, is opened as a session, and sent again.
"""

from collections.abc import Collection, Sequence

from moonpool.errors import FrameError, InvalidRequest
from moonpool.kv.blocks import DramBlock
from moonpool.kv.frames import DamagedSliceError, FrameOpener, OpenRun
from moonpool.kv.landing import land
from services.kvstore.core.assembly import Allocate, PutSpec, is_long
from services.kvstore.core.store import BlockStore


def take_whole(
    store: BlockStore, spec: PutSpec, opener: FrameOpener, runs: Sequence[OpenRun], now: float = 0.0
) -> list[int] | None:
    """Stores the blocks of a parsed frame that has all of them; None, without effect, when it takes a session.

    Returns the indices of those that were here already.

    Raises:
        FrameError: the frame is damaged, or is not what was declared.
        InvalidRequest: the frame is not all of the session, or the blocks can never be stored.
        Overloaded: pins and guarantees of others leave too little, or there is no memory.
    """
    tiers, writes, layout = store.tiers, store.writes, spec.format.layout
    if not spec.whole_blocks or opener.unfinished_bytes or is_long(runs):
        return None
    writes.check_not_deleted(spec)
    present = writes.present(spec)
    if sum(run.block_count for run, _, _ in runs) != layout.layers * len(spec.keys):
        raise InvalidRequest("frame", "is not all of the session")
    room = {spec.tenant: layout.block_bytes * (len(spec.keys) - len(present))}
    tiers.dram.check_possible(room[spec.tenant], spec.tenant, now)
    writes.offered(spec, present)  # before others are evicted
    if not tiers.reserve(room):
        return None
    try:
        blocks = _landed(spec, opener, runs, set(present), tiers.dram.arena.allocate)
    except BaseException:
        tiers.unreserve(room)
        raise
    writes.came_whole(blocks)
    tiers.dram.arrived(spec.keys)
    return present


def _landed(
    spec: PutSpec, opener: FrameOpener, runs: Sequence[OpenRun], present: Collection[int], allocate: Allocate
) -> list[DramBlock]:
    """The blocks of a frame that are not `present`."""
    layout, size = spec.format.layout, spec.format.layout.slice_bytes
    memory = {at: allocate(layout.block_bytes) for at in range(len(spec.keys)) if at not in present}
    spare = memoryview(bytearray(size if present else 0))  # for slices that nobody needs
    hashes: list[dict[int, int]] = [{} for _ in spec.keys]
    for run, data, bound in runs:
        if run.valid_tokens != layout.block_tokens:
            raise FrameError(f"{run}: only full blocks are stored")
        begin, end = run.layer * size, (run.layer + 1) * size
        values, blocks = opener.unbound(run, bound), range(run.first_block, run.first_block + run.block_count)
        if any(run.layer in hashes[block] for block in blocks):
            raise FrameError(f"{run}: has come before")
        good = land([memory[block][begin:end] if block in memory else spare for block in blocks], data, values)
        if good < len(blocks):
            raise DamagedSliceError(run.layer, blocks[good])
        for block, value in zip(blocks, bound, strict=True):
            hashes[block][run.layer] = value
    layers = range(layout.layers)
    return [DramBlock(spec.info(at), data, [hashes[at][layer] for layer in layers]) for at, data in memory.items()]
