"""A block that is damaged in the instance's own pool: its transfer fails, and the next attempt computes it anew."""

import pytest

from moonpool.base.errors import TransferFailed
from tests.unit.engine.prefill.calls import assert_arrived, begin, dismiss, promised
from tests.unit.fakes.engine import next_token
from tests.unit.instances import BLOCK, decoding, prefilling, prompt, spec


async def test_a_damaged_block_is_forgotten_so_that_the_retry_computes_it() -> None:
    tokens = prompt(4 * BLOCK + 3)
    async with prefilling() as prefill, decoding() as decode:
        await (await begin(prefill, spec("warm", tokens, max_tokens=1))).to_the_end()
        keys = prefill.service.manager.keys()
        (block,) = prefill.service.manager.match(keys[1:2])
        prefill.engine.pool.slice(2, block)[5] ^= 1
        sequence = spec("a", tokens)
        torn = await begin(prefill, sequence, target=await promised(decode, sequence))
        with pytest.raises(TransferFailed, match="block 1: wrong hash"):
            await torn.to_the_end()
        again = await begin(prefill, sequence, target=await promised(decode, sequence))
        first = await again.to_the_end()
        assert (first.token_id, first.local_tokens) == (next_token(tokens), BLOCK)
        assert_arrived(decode, tokens)
        dismiss(decode)
