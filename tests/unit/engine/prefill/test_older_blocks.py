"""KV of an instance that has not carried out a deletion yet does not come back to those that have."""

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import block_keys, pack_keys
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import ROOT
from tests.unit.engine.prefill.calls import assert_arrived, begin, dismiss, promised, source
from tests.unit.fakes.engine import next_token
from tests.unit.instances import BLOCK, Decode, Prefill, decoding, prefilling, prompt, spec

TOKENS = prompt(4 * BLOCK + 3)
KEYS = block_keys(ROOT, TOKENS, BLOCK)
DELETION = kv_pb2.Deletion(id="one", selection=kv_pb2.Selection(keys=pack_keys(KEYS[1:2])))


async def delete(prefill: Prefill | Decode) -> int:
    """Deletes the second block; returns how many were there."""
    answer: kv_pb2.ForgetResponse = await prefill.stub.Forget(kv_pb2.ForgetRequest(deletions=[DELETION]))
    return answer.blocks


async def compute(prefill: Prefill) -> None:
    """The instance holds the prompt's blocks."""
    await (await begin(prefill, spec("warm", TOKENS, max_tokens=1))).to_the_end()


async def test_nothing_is_read_from_a_peer_that_has_not_deleted_yet() -> None:
    """What it has computed since is younger, and is read."""
    async with prefilling() as peer, prefilling() as prefill:
        await compute(peer)
        assert await delete(prefill) == 0
        wanted = {"source": source(peer.instance, 4)}
        told = await (await begin(prefill, spec("a", TOKENS, max_tokens=1), **wanted)).to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), 0)
        assert await delete(peer) == 1
        await compute(peer)
        prefill.service.executor.pool.forget(DeleteKV(9, KVSelection(keys=frozenset(KEYS))))
        told = await (await begin(prefill, spec("b", TOKENS, max_tokens=1), **wanted)).to_the_end()
        assert (told.token_id, told.loaded_tokens) == (next_token(TOKENS), 4 * BLOCK)


async def test_decode_keeps_nothing_of_a_prefill_that_has_not_deleted_yet() -> None:
    """The request is served all the same."""
    async with prefilling() as prefill, decoding() as decode:
        await compute(prefill)
        assert await delete(decode) == 0
        sequence = spec("a", TOKENS)
        told = await (await begin(prefill, sequence, target=await promised(decode, sequence))).to_the_end()
        assert (told.token_id, told.local_tokens) == (next_token(TOKENS), 4 * BLOCK)
        assert_arrived(decode, TOKENS)
        dismiss(decode)
        await decode.rest()
        assert decode.service.manager.keys() == []

        assert await delete(prefill) == 1
        sequence = spec("b", TOKENS)
        told = await (await begin(prefill, sequence, target=await promised(decode, sequence))).to_the_end()
        assert told.local_tokens == BLOCK
        dismiss(decode)
        await decode.rest()
        assert set(decode.service.manager.keys()) == set(KEYS)
