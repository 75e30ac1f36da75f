"""Two prefill instances without a kvstore: a prompt is forced away from the one that has its prefix, and reads it.

Compute is emulated, so that an instance is busy for as long as a test needs; the KV is real, and the engines check
every slot of it before they attend to it.
"""

import dataclasses
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import StackPlan
from moonpool.client import Client, GenerateResult
from moonpool.kv.keys import block_keys, chain_root, pack_keys, tokens_to_bytes
from moonpool.sampling_params import SamplingParams
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.faults.scene import judge_of
from tests.integration.conftest import BLOCK, slow_prefill, small_plan, tokens
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow

RATES = "rates: {load_bytes_per_s: 1.0e+9, transfer_bytes_per_s: 6.4e+4}"
"""KV of a token crosses a link in two milliseconds."""
PREFIX, LONG = 64 * BLOCK, 4000
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@pytest.fixture
def plan(checkpoint: Path, tmp_path: Path) -> StackPlan:
    return slow_prefill(dataclasses.replace(small_plan(checkpoint, tmp_path), prefill=2, kvstore=0), RATES)


@contextmanager
def busy(stack: CheckedStack, client: Client, holder: str) -> Iterator[None]:
    """An instance computes a long prompt that no conductor has placed, and the conductor has heard of it."""
    with grpc.insecure_channel(stack.address) as channel:
        state = ConductorServiceStub(channel).ClusterState(conductor_pb2.ClusterStateRequest())
    root, prompt = chain_root(state.model.namespace, "busy"), tokens(LONG, "long")
    spec = kv_pb2.SequenceSpec(
        request_id="busy",
        token_ids=tokens_to_bytes(prompt),
        prompt_tokens=LONG,
        block_keys=pack_keys(block_keys(root, prompt, BLOCK)),
        chain_root=root,
        tenant="busy",
        sampling=kv_pb2.Sampling(max_tokens=1, temperature=0.0),
    )
    with grpc.insecure_channel(stack.services[holder].address) as channel:
        call = PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(sequence=spec))
        assert next(call).HasField("accepted")
        pause = threading.Event()
        while not next(it for it in client.cluster_state().instances if it.id == holder).queued_tokens:
            pause.wait(0.01)
        yield
        call.cancel()


def first_of(stack: CheckedStack, client: Client, prefix: list[int]) -> str:
    """Has a prefix computed; returns where."""
    first = client.generate(token_ids=prefix, sampling=ONE)
    wait_at_rest(stack.address, timeout_s=20)
    return first.placement.prefill


def check(stack: CheckedStack, prompt: list[int], result: GenerateResult, holder: str) -> None:
    assert result.placement.prefill == {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[holder]
    assert result.placement.kvstore == holder
    assert judge_of(Path(stack.plan.model), stack.plan.engine).wrong(prompt, result.token_ids, None) == ""


def test_a_prefix_is_read_from_the_other_instance_also_when_it_is_killed_meanwhile(plan: StackPlan) -> None:
    """The read takes two seconds. What has not come when the peer is killed is computed, and the answer is the same."""
    prefix, others = tokens(PREFIX, "peer"), tokens(PREFIX, "killed")
    with CheckedStack(plan) as stack, Client(stack.address) as client:
        holder = first_of(stack, client, prefix)
        prompt = [*prefix, *tokens(3, "question")]
        with busy(stack, client, holder):
            result = client.generate(token_ids=prompt, sampling=ONE)
        check(stack, prompt, result, holder)
        assert result.usage.cached_tokens == PREFIX
        assert stack.gauge(holder, "peer_read_bytes_total") == PREFIX * 128
        wait_at_rest(stack.address, timeout_s=20)

        holder = first_of(stack, client, others)
        reader = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[holder]
        prompt = [*others, *tokens(3, "question")]
        with busy(stack, client, holder), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.generate, token_ids=prompt, sampling=ONE)
            pause = threading.Event()
            while not stack.gauge(reader, "loads"):
                pause.wait(0.01)
            stack.services[holder].signal(signal.SIGKILL)
            result = asked.result()
        check(stack, prompt, result, holder)
        assert result.usage.cached_tokens == 0
        assert stack.gauge(reader, "load_failures_total") == 1
        stack.services[holder].wait(10)
        stack.restart(holder)
        wait_at_rest(stack.address, timeout_s=20)
