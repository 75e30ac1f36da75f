"""Several kvstores: chains spread over them, each is found again, and the loss of one costs its own share only.

Compute is emulated, so that loading is cheaper on a busy machine, too.
"""

import dataclasses
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from moonpool.checkpoint import load_config
from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import StackPlan
from moonpool.client import Client, GenerateResult
from moonpool.engine.emulated.kv import continuation
from moonpool.sampling_params import SamplingParams
from moonpool.v1 import prefill_pb2, prefill_pb2_grpc
from tests.integration.conftest import BLOCK, slow_prefill, tokens, with_flags
from tests.integration.stack import CheckedStack

ANSWER = 4
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
BLOCKS = 6
REST_S = 20.0


@pytest.fixture
def plan(plan: StackPlan) -> StackPlan:
    """Three stores, and a prefill pool of two chains: whatever comes later must be loaded from a store, or computed."""
    pool = str(2 * BLOCKS + 2)
    slow = slow_prefill(dataclasses.replace(plan, kvstore=3))
    slow = with_flags(slow, "prefill", "--set", f"blocks={pool}", "--set", f"write_back_blocks={pool}")
    return with_flags(slow, "conductor", "--set", "peers=false")


def prompts(count: int, what: str) -> list[list[int]]:
    return [tokens(BLOCKS * BLOCK + 3, f"{what} {number}") for number in range(count)]


def serve(client: Client, asked: Sequence[Sequence[int]]) -> list[GenerateResult]:
    return [client.generate(token_ids=list(prompt), sampling=GREEDY) for prompt in asked]


def indexed(client: Client) -> dict[str, int]:
    """Blocks that the conductor knows of in each store."""
    state = client.cluster_state()
    return {it.id: it.indexed_blocks for it in state.instances if it.id.startswith("kvstore")}


def wait_indexed(stack: CheckedStack, client: Client, blocks: int) -> dict[str, int]:
    """Waits until everything is stored, and the conductor has heard of so many blocks."""
    wait_at_rest(stack.address, REST_S)
    deadline, pause = time.monotonic() + REST_S, threading.Event()
    while sum(indexed(client).values()) < blocks:
        assert time.monotonic() < deadline, indexed(client)
        pause.wait(0.02)
    return indexed(client)


def wait_gone(client: Client, store: str) -> None:
    """Waits until the conductor has noticed."""
    deadline, pause = time.monotonic() + REST_S, threading.Event()
    while store in indexed(client):
        assert time.monotonic() < deadline, f"{store} is still a member"
        pause.wait(0.02)


def wait_loading(prefill: str) -> None:
    """Waits until a load is under way; asks prefill alone, because the store would not answer."""
    deadline, pause = time.monotonic() + REST_S, threading.Event()
    with grpc.insecure_channel(prefill) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        while not any(
            gauge.name == "loads" and gauge.value
            for gauge in stub.PrefillStats(prefill_pb2.PrefillStatsRequest(), timeout=REST_S).gauges
        ):
            assert time.monotonic() < deadline, "nothing is loaded"
            pause.wait(0.005)


def kill(stack: CheckedStack, store: str) -> None:
    stack.services[store].signal(signal.SIGKILL)
    stack.services[store].wait(10)


def cached(results: Sequence[GenerateResult]) -> list[int]:
    return [result.usage.cached_tokens for result in results]


def check_right(plan: StackPlan, asked: Sequence[Sequence[int]], results: Sequence[GenerateResult]) -> None:
    config = load_config(Path(plan.model))
    for prompt, result in zip(asked, results, strict=True):
        expected = continuation(prompt, ANSWER, config.vocab_size, config.eos_token_ids)
        assert list(result.token_ids) == expected


def killed_while_loading(stack: CheckedStack, client: Client, store: str, prompt: list[int]) -> GenerateResult:
    """A request that loads from a store which says no more, and then dies."""
    stack.services[store].signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.generate, token_ids=prompt, sampling=GREEDY)
        wait_loading(stack.services["prefill-0"].address)
        kill(stack, store)
        return asked.result(timeout=60)


def test_chains_spread_and_a_lost_store_costs_its_share(plan: StackPlan) -> None:
    """One copy of each chain."""
    asked = prompts(12, "one copy")
    with CheckedStack(plan) as stack, Client(stack.address) as client:
        first = serve(client, asked)
        held = wait_indexed(stack, client, len(asked) * BLOCKS)
        assert len(held) == 3
        assert all(blocks > 0 and blocks % BLOCKS == 0 for blocks in held.values()), held
        second = serve(client, asked)
        homes = [result.placement.kvstore for result in second]
        assert cached(second) == [BLOCKS * BLOCK] * len(asked)
        assert {name: count * BLOCKS for name, count in Counter(homes).items()} == held
        check_right(plan, [*asked, *asked], [*first, *second])

        lost = homes[0]
        met = killed_while_loading(stack, client, lost, asked[0])
        assert met.usage.cached_tokens == 0
        wait_gone(client, lost)
        third = serve(client, asked[1:])
        check_right(plan, asked, [met, *third])
        expected = [0 if home == lost else BLOCKS * BLOCK for home in homes[1:]]
        assert cached(third) == expected

        stack.restart(lost)
        wait_indexed(stack, client, len(asked) * BLOCKS)
        back = serve(client, asked)
        assert cached(back) == [BLOCKS * BLOCK] * len(asked)
        check_right(plan, asked, back)
        new = prompts(8, "after its return")
        before = wait_indexed(stack, client, len(asked) * BLOCKS)
        serve(client, new)
        after = wait_indexed(stack, client, sum(before.values()) + len(new) * BLOCKS)
        assert after[lost] > before[lost]


def test_a_copy_serves_when_a_store_is_lost(plan: StackPlan) -> None:
    """Two copies of each chain: no store's loss is a miss, not even in the middle of a load."""
    asked = prompts(5, "two copies")
    with CheckedStack(dataclasses.replace(plan, kvstore_replicas=2)) as stack, Client(stack.address) as client:
        first = serve(client, asked)
        held = wait_indexed(stack, client, 2 * len(asked) * BLOCKS)
        assert sum(held.values()) == 2 * len(asked) * BLOCKS
        assert max(held.values()) <= len(asked) * BLOCKS
        second = serve(client, asked)
        lost = second[0].placement.kvstore
        met = killed_while_loading(stack, client, lost, asked[0])
        assert met.usage.cached_tokens == BLOCKS * BLOCK
        wait_gone(client, lost)
        third = serve(client, asked)
        assert cached(third) == [BLOCKS * BLOCK] * len(asked)
        assert lost not in {result.placement.kvstore for result in third}
        check_right(plan, [*asked, asked[0], *asked], [*first, met, *third])
        # What was served has two copies again, on the stores that are left.
        assert wait_indexed(stack, client, 2 * len(asked) * BLOCKS) == {
            name: len(asked) * BLOCKS for name in held if name != lost
        }
        stack.restart(lost)
