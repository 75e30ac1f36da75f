"""Services die, disks lie, clients leave: the answer stays right and everything reserved comes back."""

import asyncio
import dataclasses
import signal
from pathlib import Path

import pytest

from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, Client, Overloaded, SamplingParams, Slo
from tests.integration.conftest import BLOCK, tokens, wait_busy
from tests.integration.reference import Reference

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def forget_engine_pools(stack: LocalStack) -> None:
    """Restarts prefill and decode, so that KV can only come from the kvstore."""
    for service_id in ("prefill-0", "decode-0"):
        stack.restart(service_id)


@pytest.mark.parametrize("kill", [True, False], ids=["kill -9", "SIGTERM"])
def test_kvstore_restarted_between_requests(stack: LocalStack, reference: Reference, kill: bool) -> None:
    """What was DURABLE is a hit after the restart, also for engines that have forgotten everything."""
    prompt = tokens(6 * BLOCK + 3, "restart")
    with Client(stack.address) as client:
        first = client.generate(token_ids=prompt, sampling=GREEDY)
        wait_at_rest(stack.address, timeout_s=20)
        stack.restart("kvstore-0", kill=kill)
        forget_engine_pools(stack)
        second = client.generate(token_ids=prompt, sampling=GREEDY)
    assert second.usage.cached_tokens == 6 * BLOCK
    assert second.placement.kvstore == "kvstore-0"
    assert second.token_ids == first.token_ids
    reference.assert_greedy(prompt, second.token_ids)


def test_corrupted_block_on_disk(stack: LocalStack, plan: StackPlan, reference: Reference) -> None:
    """Every stored byte of KV is flipped on disk: the store notices, prefill recomputes, the answer is right."""
    prompt = tokens(6 * BLOCK, "corrupt")
    with Client(stack.address) as client:
        client.generate(token_ids=prompt, sampling=GREEDY)
        wait_at_rest(stack.address, timeout_s=20)
        stack.services["kvstore-0"].signal(signal.SIGKILL)
        stack.services["kvstore-0"].wait(10)
        flipped = corrupt_segments(plan.data_dir / "kvstore-0")
        assert flipped > 0
        stack.restart("kvstore-0")
        forget_engine_pools(stack)
        result = client.generate(token_ids=prompt, sampling=GREEDY)
    assert result.usage.cached_tokens < 5 * BLOCK
    reference.assert_greedy(prompt, result.token_ids)


def corrupt_segments(data_dir: Path) -> int:
    """Flips one bit in every 64th byte of the second half of each segment file; returns the number of flipped bits."""
    flipped = 0
    for path in data_dir.rglob("*.seg"):
        data = bytearray(path.read_bytes())
        for position in range(len(data) // 2, len(data), 64):
            data[position] ^= 0x10
            flipped += 1
        path.write_bytes(data)
    return flipped


def test_kvstore_gone(stack: LocalStack, reference: Reference) -> None:
    """Without a store requests are served all the same."""
    stack.services["kvstore-0"].signal(signal.SIGKILL)
    stack.services["kvstore-0"].wait(10)
    prompt = tokens(5 * BLOCK, "gone")
    with Client(stack.address) as client:
        for _ in range(2):
            result = client.generate(token_ids=prompt, sampling=GREEDY)
            reference.assert_greedy(prompt, result.token_ids)
    stack.restart("kvstore-0")


def test_client_leaves_in_prefill(stack: LocalStack) -> None:
    """The task is cancelled while the prompt is being computed."""

    async def run() -> None:
        async with AsyncClient(stack.address) as client:
            prompt = tokens(1800, "leave prefill")
            task = asyncio.create_task(client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=200)))
            await asyncio.to_thread(wait_busy, stack.address, "prefill-0", timeout_s=20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    wait_at_rest(stack.address, timeout_s=20)


def test_client_leaves_in_decode(stack: LocalStack) -> None:
    """The iteration is left after some tokens."""
    with Client(stack.address) as client:
        received = 0
        stream = client.stream(
            token_ids=tokens(50, "leave decode"), sampling=SamplingParams(max_tokens=1500, ignore_eos=True)
        )
        for event in stream:
            received += len(event.token_ids)
            if received >= 5:
                break
        stream.close()
        wait_at_rest(stack.address, timeout_s=20)
        again = client.generate(token_ids=tokens(50, "leave decode"), sampling=GREEDY)
        assert len(again.token_ids) == 8


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_instance_killed_in_the_middle(plan: StackPlan, reference: Reference, victim: str) -> None:
    """An instance is killed while a request runs: another takes over, no token is lost or doubled."""
    prompt = tokens(70, f"killed {victim}")
    with LocalStack(dataclasses.replace(plan, prefill=2, decode=2)) as stack, Client(stack.address) as client:
        output: list[int] = []
        killed = ""
        sampling = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
        stream = client.stream(token_ids=prompt, sampling=sampling)
        for event in stream:
            output += event.token_ids
            if len(output) >= 5 and not killed and stream.placement is not None:
                killed = stream.placement.decode if victim == "decode" else stream.placement.prefill
                stack.services[killed].signal(signal.SIGKILL)
        assert stream.result is not None
        assert stream.result.token_ids == output
        assert len(stream.result.placements) == (2 if victim == "decode" else 1)
        assert len(output) == 300
        reference.assert_greedy(prompt, output)
        stack.restart(killed)
        wait_at_rest(stack.address, timeout_s=20)


def test_refused_early(stack: LocalStack) -> None:
    """A TTFT that cannot be kept is refused with the prediction, before any work."""
    with Client(stack.address) as client:
        client.generate(token_ids=tokens(40, "warm"), sampling=GREEDY)
        with pytest.raises(Overloaded) as refused:
            client.generate(token_ids=tokens(1500, "late"), sampling=GREEDY, slo=Slo(ttft_s=1e-6))
    assert refused.value.reason == "ttft_slo"
    assert refused.value.predicted_ttft_s > 1e-6
    assert refused.value.retry_after_s > 0


def test_bfloat16_is_within_tolerance(plan: StackPlan, reference: Reference) -> None:
    """Teacher-forced, each token's logit is within 5 % of the float32 reference's logit range of the best."""
    prompt = tokens(120, "bf16")
    with LocalStack(dataclasses.replace(plan, dtype="bfloat16")) as stack, Client(stack.address) as client:
        result = client.generate(
            token_ids=prompt, sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        )
        wait_at_rest(stack.address, timeout_s=20)
    logits = reference.logits(prompt)
    spread = float(logits.max() - logits.min())
    reference.assert_greedy(prompt, result.token_ids, tolerance=0.05 * spread)
