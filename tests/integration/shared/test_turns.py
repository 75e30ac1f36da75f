"""A conversation's first turn is found by the second one, also when its prompt is shorter than a block.

And the turn of one tenant among the requests of another that floods.
"""

import asyncio
import threading
import time

import pytest

from moonpool.client import AsyncClient, Client, SamplingParams, Slo
from tests.integration.conftest import BLOCK, tokens
from tests.integration.reference import Reference
from tests.integration.stack import REST_TIMEOUT_S, CheckedStack

ANSWER = 3 * BLOCK
FLOOD = 12
LENGTH = 900


def indexed(client: Client) -> int:
    """Blocks that the conductor knows of in the kvstore."""
    return sum(it.indexed_blocks for it in client.cluster_state().instances if it.kind == "kvstore")


def wait_indexed(client: Client, blocks: int) -> None:
    """Waits until it knows of so many."""
    deadline, pause = time.monotonic() + REST_TIMEOUT_S, threading.Event()
    while indexed(client) < blocks:
        assert time.monotonic() < deadline, client.cluster_state()
        pause.wait(0.02)


def test_the_answer_to_a_prompt_shorter_than_a_block_is_found_in_the_next_turn(stack: CheckedStack) -> None:
    prompt = tokens(BLOCK - 5, "first turn")
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    with Client(stack.address) as client:
        before = indexed(client)
        first = client.generate(token_ids=prompt, sampling=greedy)
        # The last token is sampled and not computed, so its KV is not there.
        whole = (len(prompt) + len(first.token_ids) - 1) // BLOCK
        wait_indexed(client, before + whole)
        second = client.generate(
            token_ids=prompt + first.token_ids + tokens(9, "second turn"), sampling=SamplingParams(max_tokens=2)
        )
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, whole * BLOCK)


@pytest.mark.parametrize("length", [BLOCK // 2, 3 * BLOCK + 4])
def test_a_turn_that_follows_at_once_finds_the_answer(stack: CheckedStack, length: int) -> None:
    """An answer's blocks are stored as they fill, so all but those of the last moment are there when it ends."""
    prompt = tokens(length, f"at once {length}")
    whole = 10 - length // BLOCK
    answer = whole * BLOCK + BLOCK - length % BLOCK
    greedy = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    with Client(stack.address) as client:
        first = client.generate(token_ids=prompt, sampling=greedy)
        turn = prompt + first.token_ids + tokens(9, "next")
        second = client.generate(token_ids=turn, sampling=SamplingParams(max_tokens=2))
    full = (length + answer - 1) // BLOCK
    print(f"{second.usage.cached_tokens} of {full * BLOCK} tokens")
    assert (full - 2) * BLOCK <= second.usage.cached_tokens <= full * BLOCK


def test_blocks_are_stored_while_the_answer_grows(stack: CheckedStack) -> None:
    """The kvstore has the first ones before the last token is there."""
    prompt = tokens(BLOCK, "while it grows")
    greedy = SamplingParams(max_tokens=60 * BLOCK, temperature=0.0, ignore_eos=True)
    with Client(stack.address) as client:
        before = stack.gauge("decode-", "write_back_stored_blocks")
        for event in client.stream(token_ids=prompt, sampling=greedy):
            if event.position >= 4 * BLOCK and stack.gauge("decode-", "write_back_stored_blocks") > before + 1:
                break
        else:
            raise AssertionError("nothing was stored before the answer was whole")


async def first_tokens(address: str) -> tuple[list[str], list[int]]:
    """Tenants in the order of their first tokens, and the calm tenant's answer; all ask at once, it asks last."""
    order: list[str] = []
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    async with AsyncClient(address) as client:

        async def ask(tenant: str, prompt: list[int], priority: int) -> list[int]:
            limits = Slo(ttft_s=600.0, queue_s=60.0)
            stream = client.stream(token_ids=prompt, sampling=sampling, tenant=tenant, priority=priority, slo=limits)
            found: list[int] = []
            async for event in stream:
                if not found:
                    order.append(tenant)
                found += event.token_ids
            return found

        flood = [ask("flood", tokens(LENGTH, f"flood {number}"), -1) for number in range(FLOOD)]
        *_, answer = await asyncio.gather(*flood, ask("calm", tokens(LENGTH, "calm"), 1))
        queue = (await client.cluster_state()).queue
        assert (queue.for_limits, queue.for_room, queue.prompt_bytes, queue.tenants) == (0, 0, 0, ())
    return order, answer


def test_a_flood_does_not_delay_another_tenant(stack: CheckedStack, reference: Reference) -> None:
    """First come first served, or by the priorities that they give themselves, it would be the last one."""
    order, answer = asyncio.run(first_tokens(stack.address))
    assert len(order) == FLOOD + 1
    assert order.index("calm") <= FLOOD // 2
    reference.assert_greedy(tokens(LENGTH, "calm"), answer)
