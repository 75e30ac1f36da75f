"""Blocks of a model with windows: full and windowed layers are stored apart, over a real server and real clients."""

from pathlib import Path

import pytest

from moonpool.base.kv.blocks import block_format
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import block_keys, pack_keys, window_key
from moonpool.base.kv.layout import KVLayout, LayerKV
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader, PrefixLost
from moonpool.base.kv_transfer.store_writer import PutOutcome
from moonpool.base.kv_transfer.stored_parts import PartedReader, PartedWriter, WindowLost
from moonpool.engine.prefill.core.outgoing_kv import OutgoingKV
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.layouts import GROUPED
from tests.slices import hashed
from tests.unit.kvstore.helpers import slice_of
from tests.unit.kvstore.rig import Rig, rig

KEYS = block_keys(bytes(32), range(6 * 16), 16)
PARENTS = [bytes(32), *KEYS]
NAMESPACE = b"w" * 32
WINDOWED = GROUPED.windowed_layers
TINY = KVLayout.of_layers(16, [LayerKV(2, 16, "float32", "window", 48), LayerKV(2, 16, "float32")] * 2)
GEMMA_270M = KVLayout.of_layers(
    64, [LayerKV(1, 256, "bfloat16", *(() if layer % 6 == 5 else ("window", 512))) for layer in range(18)]
)
READ = hashed(lambda layer, index: slice_of(KEYS[index], layer, GROUPED))


def endpoint(store: Rig, layout: KVLayout = GROUPED) -> KVEndpoint:
    hello = kv_pb2.StreamHello(namespace=NAMESPACE, layout=layout.to_proto())
    return KVEndpoint(store.channels, store.address, hello, layout)


async def put(store: Rig, blocks: int, windowed: tuple[int, ...]) -> PutOutcome:
    writer = PartedWriter(endpoint(store))
    try:
        return await writer.put(KEYS[:blocks], PARENTS[:blocks], "t", READ, timeout_s=10, windowed=windowed)
    finally:
        await writer.aclose()
        assert (writer.channels, writer.traffic.unsent) == (0, 0)


class Taken:
    """What a read hands out; `layers` as they were reported."""

    def __init__(self) -> None:
        self.slices: dict[tuple[int, int], bytes] = {}
        self.layers: list[int] = []

    async def read(self, store: Rig, blocks: int) -> int:
        memory = {
            (layer, index): bytearray(GROUPED.slice_bytes(layer)) for layer in range(4) for index in range(blocks)
        }

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            self.slices[layer, index] = bytes(data)

        reader = PartedReader(endpoint(store), BlockReader)
        try:
            return await reader.read_prefix(
                KEYS[:blocks],
                on_slice=take,
                on_layer=self.layers.append,
                timeout_s=10,
                tenant="t",
                into=lambda layer, index: memoryview(memory[layer, index]),
            )
        finally:
            await reader.aclose()
            assert (reader.channels, reader.traffic.unsent) == (0, 0)


async def test_a_prefix_comes_with_its_window(tmp_path: Path) -> None:
    """A window of 20 tokens needs two blocks of 16; layers are reported in order; the same after a restart."""
    wanted = {
        (layer, index): slice_of(KEYS[index], layer, GROUPED)
        for layer in range(4)
        for index in range(4 if layer in WINDOWED else 0, 6)
    }
    for restarted in (False, True):
        async with rig(tmp_path) as store:
            if not restarted:
                assert await put(store, 6, (4, 5)) == PutOutcome(0, 6)
                await store.durable()
            taken = Taken()
            assert await taken.read(store, 6) == 6
            assert taken.slices == wanted
            assert taken.layers == [0, 1, 2, 3]
            await store.at_rest()


async def test_what_lacks_its_window_is_not_handed_out() -> None:
    """Inner borders have none, until somebody brings it; an absent block is told."""
    async with rig() as store:
        await put(store, 5, (3, 4))
        with pytest.raises(WindowLost, match="of block 2 "):
            await Taken().read(store, 4)
        assert await put(store, 4, (2, 3)) == PutOutcome(4, 0)
        assert await Taken().read(store, 4) == 4
        with pytest.raises(PrefixLost) as caught:
            await Taken().read(store, 6)
        assert caught.value.blocks == 5
        await store.at_rest()


async def test_deleting_and_pinning_a_block_means_its_windowed_slices_too() -> None:
    async with rig() as store:
        await put(store, 4, (2, 3))
        request = kvstore_pb2.PinRequest(name="pin", keys=pack_keys(KEYS[:4]), ttl_s=60, tenant="t")
        pinned: kvstore_pb2.PinResponse = await store.stub.Pin(request, timeout=10)
        sizes = [part.layout.block_bytes for part in GROUPED.stored_parts]
        assert (pinned.blocks, pinned.bytes) == (4, 4 * sizes[0] + 2 * sizes[1])
        await store.stub.Unpin(kvstore_pb2.UnpinRequest(name="pin", tenant="t"), timeout=10)
        for _ in store.service.store.delete_selected(KVSelection(frozenset(KEYS[3:4]))):
            pass
        tiers = store.service.store.tiers
        here = [tiers.format_of(key) is not None for key in (*KEYS[:4], *map(window_key, KEYS[:4]))]
        assert here == [True, True, True, False, False, False, True, False]


def test_a_layout_is_divided_only_if_some_layers_have_windows() -> None:
    full, windowed = GROUPED.stored_parts
    assert (full.layers, windowed.layers) == ((0, 2), (1, 3))
    assert full.layout == KVLayout.uniform(2, 2, 8, 16, "bfloat16")
    assert full.layout.block_bytes + windowed.layout.block_bytes == GROUPED.block_bytes
    assert GROUPED.unread_windows(6) == 4
    alike = KVLayout.of_layers(16, [LayerKV(2, 8, "bfloat16", "window", 20)] * 2)
    for layout in (alike, full.layout):
        assert [part.layout for part in layout.stored_parts] == [layout]
        assert layout.unread_windows(6) == 0
    assert block_format(NAMESPACE, full.layout) != block_format(NAMESPACE, windowed.layout)


@pytest.mark.parametrize(
    ("name", "layout", "tokens", "least"),
    [
        ("tiny-gemma3", TINY, 512, 1.8),
        ("Gemma 3 270M", GEMMA_270M, 8192, 4.0),
    ],
)
async def test_bytes_of_a_prompt(name: str, layout: KVLayout, tokens: int, least: float) -> None:
    """What a prompt takes on the wire and in a store, beside all of its slices."""
    settings = PrefillSettings(
        num_blocks=512,
        block_size=layout.block_size,
        layers=layout.layers,
        block_bytes=layout.block_bytes,
        max_num_batched_tokens=512,
        windowed_layers=layout.windowed_layers,
        window_blocks=layout.window_blocks,
    )
    blocks, outgoing = layout.blocks_for(tokens), OutgoingKV.of(settings, tokens, 0)
    for layer in range(layout.layers):
        outgoing.add(layer, 0, blocks, None)
    wire = sum((span.end - span.first) * layout.slice_bytes(span.layer) for span in outgoing.pending)
    keys = block_keys(bytes(32), range(tokens), layout.block_size)
    slices = {layer: bytes(layout.slice_bytes(layer)) for layer in range(layout.layers)}
    async with rig(dram_bytes=2 * blocks * layout.block_bytes) as store:
        writer = PartedWriter(endpoint(store, layout))
        first = layout.first_windowed_block(tokens)
        read = hashed(lambda layer, _: slices[layer])
        await writer.put(keys, [bytes(32), *keys[:-1]], "t", read, timeout_s=60, windowed=range(first, blocks))
        await writer.aclose()
        stored = store.service.store.tiers.dram.block_bytes
    whole = blocks * layout.block_bytes
    print(
        f"{name}, {tokens} tokens: all slices {whole} bytes, wire {wire}, store {stored} ({whole / stored:.2f} times)"
    )
    assert wire == stored
    assert whole / stored > least
