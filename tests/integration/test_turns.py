"""A conversation's first turn is found by the second one, also when its prompt is shorter than a block."""

import threading
import time

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
