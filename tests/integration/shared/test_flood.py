"""The turn of one tenant among the requests of another that floods."""

import asyncio

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient, Slo
from tests.integration.conftest import tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

FLOOD = 12
LENGTH = 900


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
