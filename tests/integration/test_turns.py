"""A conversation's first turn is found by the second one, also when its prompt is shorter than a block."""

import threading
import time

import pytest

from moonpool.client import Client, SamplingParams
from tests.integration.conftest import BLOCK, tokens
from tests.integration.stack import REST_TIMEOUT_S, CheckedStack

ANSWER = 3 * BLOCK


def wait_indexed(client: Client, blocks: int) -> None:
    """Waits until the conductor knows of so many blocks in the kvstore."""
    deadline, pause = time.monotonic() + REST_TIMEOUT_S, threading.Event()
    while sum(it.indexed_blocks for it in client.cluster_state().instances if it.kind == "kvstore") < blocks:
        assert time.monotonic() < deadline, client.cluster_state()
        pause.wait(0.02)


def test_the_answer_to_a_prompt_shorter_than_a_block_is_found_in_the_next_turn(stack: CheckedStack) -> None:
    prompt = tokens(BLOCK - 5, "first turn")
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    with Client(stack.address) as client:
        first = client.generate(token_ids=prompt, sampling=greedy)
        # The last token is sampled and not computed, so its KV is not there.
        whole = (len(prompt) + len(first.token_ids) - 1) // BLOCK
        wait_indexed(client, whole)
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
