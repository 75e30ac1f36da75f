"""Sizes that no flag gives, by the memory of devices and host: the KV pool, and the largest step. Torch-free.

Stages tell their free memory once their weights are loaded, so that no guess about weights is needed. An engine takes a
share of each device (`EngineSpec.memory_share`), and stages on one device divide the engine's share: other engines have
theirs. What weights and steps leave of the share holds KV. The host's pool has the same blocks, so that the same share
of the host's free memory bounds them, too, less the memory that other programs need.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from moonpool.base.checkpoint import ModelConfig
from moonpool.base.errors import ConfigError
from moonpool.base.families.ranks import decoder_of_rank
from moonpool.engine.footprint import device_footprint, lora_bytes
from moonpool.engine.messages import EngineSizes, EngineSpec, StageRoom
from moonpool.engine.platforms.registry import DeviceName, engine_devices

_STEPS = (8192, 4096, 2048, 1024, 512)
"""Tokens in the largest prefill step: products with more rows are hardly quicker per row on any GPU."""
_SLOWER = {100: 8192, 60: 4096}
"""Most tokens, by the least number of multiprocessors: an 8B model's step then takes some 0.3 s."""
_WORK_SHARE = 8
"""Steps are made smaller until their need beyond the smallest steps is at most this fraction."""
_HOST_SHARE = 0.75
"""Part of the host's free memory that all engines with share 1 take together: kvstores and file caches need some."""
_PROCESS_BYTES = 768 << 20
"""A GPU process's memory beside its allocations: the driver's context, libraries, kernel code, and holes."""
_GROWTH_BYTES = 384 << 20
"""Of these, what comes after the weights are loaded."""


def choose_sizes(
    model: ModelConfig, spec: EngineSpec, rooms: Sequence[Sequence[StageRoom]], host_free: int | None
) -> EngineSizes:
    """Return the pool's blocks and the largest step's tokens; sizes in the specification stay unchanged.

    Args:
        model: served.
        spec: the engine's; 0 blocks or step tokens are chosen.
        rooms: what each stage's ranks told.
        host_free: bytes that the host can still give; None = any.

    Raises:
        ConfigError: there is no room for a block; names the field `kv_cache_memory_bytes`.
    """
    layout, longest, own = spec.layout, spec.max_tokens, spec.layout.of_rank(spec.ranks)
    model = replace(model, decoder=decoder_of_rank(model.decoder, spec.ranks))
    stages = [range(*stage) for stage in spec.stage_layers]
    lefts = _left(spec, rooms)
    slots = layout.window_slots(spec.blocks, spec.max_num_batched_tokens or _STEPS[-1], longest)
    given = [own.pool_bytes(spec.blocks, slots, layers) for layers in stages]
    least = min(left - pool for left, pool in zip(lefts, given, strict=True))
    tokens = spec.max_num_batched_tokens or _step_tokens(model, spec, rooms, least)
    beside = _beside(model, spec, tokens)
    by_stage = [
        layout.blocks_in(left - beside, tokens, longest, layers, held=own)
        for left, layers in zip(lefts, stages, strict=True)
    ]
    blocks, bound = min(by_stage), "device's memory"
    on_host = blocks
    if host_free is not None:
        on_host = layout.blocks_in(int(spec.memory_share * _HOST_SHARE * host_free), tokens, longest)
    if on_host < blocks:
        blocks, bound = on_host, "host's free memory, where the same blocks lie"
    room = StageRoom.least(rooms[by_stage.index(min(by_stage))])
    why = (
        f"{spec.memory_share:.0%} of the {bound}: the device has {room.total >> 20} MiB, {room.free >> 20} free; "
        f"weights take {room.weights >> 20}, steps and graphs {beside >> 20}, the process {_PROCESS_BYTES >> 20}"
    )
    if spec.blocks:
        return EngineSizes(spec.blocks, tokens, f"blocks as set; {why}")
    if blocks < 1:
        raise ConfigError("kv_cache_memory_bytes", f"no room for a block of {layout.block_bytes} bytes: {why}")
    return EngineSizes(blocks, tokens, why)


def _left(spec: EngineSpec, rooms: Sequence[Sequence[StageRoom]]) -> list[int]:
    """Return the bytes that each rank of a stage has for KV, steps and graphs, at least."""
    devices = engine_devices(spec.device, spec.stages, spec.ranks)
    # A stage on another host tells of its ranks together.
    placed = [list(zip(its, told, strict=False)) for its, told in zip(devices, rooms, strict=True)]
    every = list(chain.from_iterable(placed))
    on_device = Counter(device for device, _ in every)

    def left(device: DeviceName, room: StageRoom) -> int:
        # Among processes on one device, the last report has seen the weights of all.
        free = min(other.free for where, other in every if where == device)
        share = int(spec.memory_share * room.total) // on_device[device] - room.weights - _PROCESS_BYTES
        return min(share, free // on_device[device] - _GROWTH_BYTES)

    return [min(left(*both) for both in its) for its in placed]


def _step_tokens(model: ModelConfig, spec: EngineSpec, rooms: Sequence[Sequence[StageRoom]], left: int) -> int:
    """Return the tokens of the largest step: as many as the slowest device computes and the least room holds."""
    processors = min(room.processors for its in rooms for room in its)
    most = next((tokens for least, tokens in _SLOWER.items() if processors >= least), 2048)
    least = _beside(model, spec, _STEPS[-1])
    fitting = (
        tokens for tokens in _STEPS if tokens <= most and (_beside(model, spec, tokens) - least) * _WORK_SHARE <= left
    )
    return next(fitting, _STEPS[-1])


def _beside(model: ModelConfig, spec: EngineSpec, tokens: int) -> int:
    """Return the bytes that steps, graphs and adapters need beside the pool, which may hold sequences of any length."""
    longest = spec.max_tokens or model.max_position_embeddings
    sized = replace(spec, max_num_batched_tokens=tokens, blocks=-(-longest // spec.layout.block_size))
    held = device_footprint(model, sized, weights=0, pool=0)
    return held.work + held.graphs + lora_bytes(model, spec, 0, model.num_layers)
