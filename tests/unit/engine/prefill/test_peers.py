"""Prefixes read from the pools of other prefill and decode instances, and what happens when they are not there."""

from pathlib import Path

import pytest

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import block_keys
from moonpool.base.scheduling.kv_deletion import DeleteKV
from tests.unit.base.transport.fakes import LAYOUT, ROOT
from tests.unit.base.transport.pairs import transport_settings
from tests.unit.engine.prefill.calls import assert_arrived, begin, dismiss, promised, source
from tests.unit.fakes.engine import next_token
from tests.unit.instances import BLOCK, Prefill, decoding, prefilling, prompt, spec

TOKENS = prompt(4 * BLOCK + 3)
KEYS = block_keys(ROOT, TOKENS, BLOCK)


async def warm(prefill: Prefill) -> None:
    """The instance holds the prompt's blocks."""
    await (await begin(prefill, spec("warm", TOKENS, max_tokens=1))).to_the_end()


async def test_reads_from_another_prefill() -> None:
    """Loaded layer by layer, sent on to decode, told with the first token, and the reader's own from then on."""
    async with prefilling() as peer, prefilling() as prefill, decoding() as decode:
        await warm(peer)
        sequence = spec("a", TOKENS)
        target = await promised(decode, sequence)
        first = await (await begin(prefill, sequence, target=target, source=source(peer.instance, 4))).to_the_end()
        assert first.token_id == next_token(TOKENS)
        assert (first.local_tokens, first.loaded_tokens, first.computed_tokens) == (0, 4 * BLOCK, 3)
        assert [(read.source.id, read.blocks, read.seconds > 0) for read in first.reads] == [("prefill-0", 4, True)]
        assert_arrived(decode, TOKENS)
        dismiss(decode)
        assert set(prefill.service.manager.keys()) == set(KEYS)
        assert prefill.service.core.state.tracker.speeds.peer_bytes_per_s > 0
        await peer.rest()
        assert peer.service.reads.sent_bytes == 4 * LAYOUT.block_bytes


@pytest.mark.parametrize("transport", ["local", "tcp", "tls"])
async def test_reads_over_a_transport(transport: str, sockets: Path) -> None:
    transports = transport_settings(transport, sockets)
    async with prefilling(epoch=6, **transports) as peer, prefilling(**transports) as prefill:
        await warm(peer)
        told = await (
            await begin(prefill, spec("a", TOKENS, max_tokens=1), source=source(peer.instance, 4))
        ).to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), 4 * BLOCK)
        gauges = {gauge.name: gauge.value for gauge in peer.service.gauges().read()}
        assert (gauges[f"transports_{transport}_opened_total"], gauges["transports_refused_total"]) == (1, 0)


async def test_reads_from_a_decode() -> None:
    async with prefilling() as first, prefilling() as prefill, decoding() as decode:
        sequence = spec("a", TOKENS)
        await (await begin(first, sequence, target=await promised(decode, sequence))).to_the_end()
        told = await (
            await begin(prefill, spec("b", TOKENS, max_tokens=1), source=source(decode.instance, 4))
        ).to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), 4 * BLOCK)
        dismiss(decode)
        await decode.rest()
        assert decode.service.reads.sent_bytes == 4 * LAYOUT.block_bytes


@pytest.mark.parametrize("gone", [0, 2])
async def test_blocks_that_are_gone_are_computed(gone: int) -> None:
    """They are not told as missing: the peer reports by itself what it loses."""
    async with prefilling() as peer, prefilling() as prefill:
        await warm(peer)
        peer.service.executor.pool.forget(DeleteKV(1, KVSelection(keys=frozenset(KEYS[gone:]))))
        told = await (
            await begin(prefill, spec("a", TOKENS, max_tokens=1), source=source(peer.instance, 4))
        ).to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), gone * BLOCK)
        assert list(told.misses) == []


async def test_a_damaged_block_is_not_used_and_not_lent_again() -> None:
    async with prefilling() as peer, prefilling() as prefill:
        await warm(peer)
        [block] = peer.service.manager.match(KEYS[1:2])
        peer.engine.pool.slice(1, block)[0] ^= 1
        told = await (
            await begin(prefill, spec("a", TOKENS, max_tokens=1), source=source(peer.instance, 4))
        ).to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), 0)
        await peer.until(lambda: not peer.service.manager.match(KEYS[1:2]))
        assert {KEYS[0], KEYS[2]} <= set(peer.service.manager.keys())


async def test_a_damaged_block_that_cannot_be_lent_just_now_is_found_too() -> None:
    """A quarter of eight blocks is lent already."""
    async with prefilling(blocks=8) as peer:
        await warm(peer)
        reads, manager = peer.service.reads, peer.service.manager
        leases = reads.lend(KEYS[:2], 0), reads.lend(KEYS[3:], 0)
        assert [len(lease.blocks) for lease in leases] == [2, 0]
        [damaged] = manager.match(KEYS[3:])
        peer.engine.pool.slice(1, damaged)[0] ^= 1
        for key in KEYS:
            reads.suspect(key)
        await peer.until(lambda: not manager.match(KEYS[3:]))
        assert set(manager.keys()) == set(KEYS[:3])
        for lease in leases:
            reads.take_back(lease)


async def test_a_peer_that_stops_in_the_middle_of_a_read() -> None:
    """Its link is slow, so the read is under way when it ends: what has not come is computed."""
    async with prefilling(rate=1.0) as peer, prefilling() as prefill:
        await warm(peer)
        story = await begin(prefill, spec("a", TOKENS, max_tokens=1), source=source(peer.instance, 4))
        await peer.until(lambda: peer.service.reads.open_reads == 1)
        peer.service.closing.set()
        told = await story.to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), 0)
        assert prefill.service.core.loads.sources.failures == 1


async def test_a_reader_of_other_kv_is_refused() -> None:
    """It computes; a peer that serves something else is left alone for a while, as one that fails."""
    async with prefilling() as peer, prefilling() as prefill:
        await warm(peer)
        peer.service.reads.namespace = b"\1" * 32
        told = await (
            await begin(prefill, spec("a", TOKENS, max_tokens=1), source=source(peer.instance, 4))
        ).to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), 0)
        assert prefill.service.core.loads.sources.failures == 1
