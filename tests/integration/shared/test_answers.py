"""A conversation's first turn is found by the second one, also when its prompt is shorter than a block."""

import threading
import time
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import read_gauges
from moonpool.client import Client
from tests.integration.conftest import BLOCK, tokens
from tests.integration.stack import REST_TIMEOUT_S, TRIES, CheckedStack


def indexed(client: Client) -> int:
    """Blocks that the conductor knows of in the kvstore."""
    return sum(instance.indexed_blocks for instance in client.cluster_state().instances if instance.kind == "kvstore")


def wait_indexed(client: Client, blocks: int) -> None:
    """Waits until it knows of so many."""
    deadline, pause = time.monotonic() + REST_TIMEOUT_S, threading.Event()
    while indexed(client) < blocks:
        assert time.monotonic() < deadline, client.cluster_state()
        pause.wait(0.02)


@pytest.mark.parametrize("length", [BLOCK // 2, 3 * BLOCK + 4])
def test_a_turn_that_follows_at_once_finds_the_answer(stack: CheckedStack, length: int) -> None:
    """An answer's blocks are stored as they fill, so all but those of the last moment are there when it ends.

    All are stored in the end, but for the last token of each answer, which is sampled and not computed.
    """
    whole = 10 - length // BLOCK
    answer = whole * BLOCK + BLOCK - length % BLOCK
    full = (length + answer - 1) // BLOCK
    greedy = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    with Client(stack.address) as client:
        for tried in range(TRIES):
            prompt, before = tokens(length, f"at once {length} {tried}"), indexed(client)
            first = client.generate(token_ids=prompt, sampling=greedy)
            turn = prompt + first.token_ids + tokens(9, "next")
            second = client.generate(token_ids=turn, sampling=SamplingParams(max_tokens=2, ignore_eos=True))
            wait_indexed(client, before + (len(turn) + 1) // BLOCK)
            assert indexed(client) == before + (len(turn) + 1) // BLOCK
            assert first.usage.cached_tokens == 0
            print(f"{second.usage.cached_tokens} of {full * BLOCK} tokens")
            if second.usage.cached_tokens >= (full - 2) * BLOCK:
                break
            stack.restart("prefill-0")  # it has learnt that loads are slow
    assert (full - 2) * BLOCK <= second.usage.cached_tokens <= full * BLOCK


def test_blocks_are_stored_while_the_answer_grows(stack: CheckedStack) -> None:
    """The kvstore has the first ones before the last token is there."""
    prompt = tokens(BLOCK, "while it grows")
    greedy = SamplingParams(max_tokens=60 * BLOCK, temperature=0.0, ignore_eos=True)
    with Client(stack.address) as client:
        before = stack.gauge("decode-", "write_back_stored_blocks_total")
        for event in client.stream(token_ids=prompt, sampling=greedy):
            if event.position >= 4 * BLOCK and stack.gauge("decode-", "write_back_stored_blocks_total") > before + 1:
                break
        else:
            raise AssertionError("nothing was stored before the answer was whole")


def test_docs_list_each_metric_of_each_service(stack: CheckedStack) -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    readings = [
        (read_gauge.instance.partition("-")[0], read_gauge.name.partition("{")[0])
        for read_gauge in read_gauges(stack.address)
    ]
    assert {service for service, _ in readings} == {"conductor", "prefill", "decode", "kvstore"}
    names = sorted(f"`moonpool_{service}_{name}`" for service, name in readings)
    assert [name for name in names if name not in page] == []
