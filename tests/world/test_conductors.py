"""Two conductors share out what tenants may use: the real services on virtual time."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from moonpool.base.errors import Overloaded
from moonpool.client import AsyncClient, SamplingParams
from tests.world.cluster import SETTLE_S, Cluster, Simulation, answer, prompt
from tests.world.process import on_virtual_time

RPM = 60
FIRST_S, THEN_S = 90.0, 60.0
TOKENS = 4
BUDGET = ["--set", f"tenant_budgets={{ann: {{rpm: {RPM}}}}}"]


async def asks(clients: Sequence[AsyncClient], per_s: float, seconds: float) -> Counter[str]:
    """Requests at this rate, to one conductor after the other: how many are answered, and why the others are not."""
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    ends: Counter[str] = Counter()

    async def ask(number: int) -> None:
        asked = prompt(20, f"request {number}")
        client = clients[number % len(clients)]
        try:
            found = await client.generate(token_ids=asked, sampling=sampling, tenant="ann", timeout_s=60)
        except Overloaded as error:
            ends[error.reason] += 1
        else:
            assert found.token_ids == answer(asked, TOKENS)
            ends["answered"] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(round(per_s * seconds)):
            group.create_task(ask(number))
            await asyncio.sleep(1 / per_s)
    return ends


@on_virtual_time
async def test_a_tenant_at_twice_its_budget_gets_its_budget_whatever_conductors_it_asks(
    simulation: Simulation,
) -> None:
    """Also from a conductor that was killed and begins anew."""
    cluster = Cluster(simulation, {"conductor": 2}, {"conductor": BUDGET})
    await cluster.start()
    async with AsyncClient(cluster.addresses[0]) as first, AsyncClient(cluster.addresses[1]) as second:
        before = await asks([first, second], 2 * RPM / 60, FIRST_S)
        budget = RPM + RPM * FIRST_S / 60  # the bucket was full
        assert 0.95 * budget <= before["answered"] <= 1.1 * budget, before
        assert set(before) == {"answered", "request_budget"}
        cluster.services["conductor-0"].kill()
        await cluster.services["conductor-0"].start()
        await asyncio.sleep(SETTLE_S)
        after = await asks([first, second], 2 * RPM / 60, THEN_S)
        budget = RPM * THEN_S / 60
        assert 0.9 * budget <= after["answered"] <= 1.1 * budget, after
    await cluster.rest()


WEIGHTS = {"heavy": 3.0, "light": 1.0}
FLAGS = ["--block-size", "16"]
BLOCKS = 120
WARM_S, MEASURED_S = 8.0, 16.0


async def flood(client: AsyncClient, tenant: str, count: int, served: Counter[str], since: float) -> None:
    """So many requests at once, for ever; the tokens of those that end after a time are counted."""
    loop, sampling = asyncio.get_running_loop(), SamplingParams(max_tokens=96, ignore_eos=True, temperature=0.0)

    async def ask(place: int) -> None:
        number = 0
        while True:
            number += 1
            asked = prompt(100, f"{tenant} {place} {number}")
            found = await client.generate(token_ids=asked, sampling=sampling, tenant=tenant, timeout_s=600)
            served[tenant] += len(found.token_ids) if loop.time() >= since else 0

    async with asyncio.TaskGroup() as group:
        for place in range(count):
            group.create_task(ask(place))


@on_virtual_time
async def test_weights_hold_where_one_tenant_floods_both_conductors_and_the_other_one(simulation: Simulation) -> None:
    """Decode has memory for some of them; the others wait at two conductors."""
    conductor = ["--set", f"tenant_weights={WEIGHTS}", "--queue-deadline-s", "600"]
    decode = [*FLAGS, "--set", f"blocks={BLOCKS}"]
    cluster = Cluster(simulation, {"conductor": 2}, {"conductor": conductor, "prefill": FLAGS, "decode": decode})
    await cluster.start()
    served: Counter[str] = Counter()
    since = asyncio.get_running_loop().time() + WARM_S
    async with AsyncClient(cluster.addresses[0]) as first, AsyncClient(cluster.addresses[1]) as second:
        floods = [(first, "heavy", 12), (first, "light", 12), (second, "light", 12)]
        tasks = [asyncio.create_task(flood(client, tenant, count, served, since)) for client, tenant, count in floods]
        await asyncio.sleep(WARM_S + MEASURED_S)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    share = served["heavy"] / served.total()
    wanted = WEIGHTS["heavy"] / sum(WEIGHTS.values())
    assert 0.9 * wanted <= share <= 1.1 * wanted, served
    await cluster.rest()


@on_virtual_time
async def test_a_conductor_that_has_just_begun_deletes_everywhere(simulation: Simulation) -> None:
    """It waits until all instances have joined; else those would still have the KV."""
    cluster = Cluster(simulation, {"conductor": 2, "prefill": 2}, {})
    await cluster.start()
    asked, how = prompt(200, "gone"), SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    async with AsyncClient(cluster.addresses[0]) as first, AsyncClient(cluster.addresses[1]) as second:
        await first.generate(token_ids=asked, sampling=how, tenant="gone")
        assert (await first.generate(token_ids=asked, sampling=how, tenant="gone")).usage.cached_tokens
        cluster.services["conductor-1"].kill()
        await cluster.services["conductor-1"].start()
        deleted = await second.delete_kv(tenants=["gone"])
        assert {instance.instance for instance in deleted.instances} == {
            "prefill-0",
            "prefill-1",
            "decode-0",
            "kvstore-0",
        }
        assert deleted.complete
        assert not (await first.generate(token_ids=asked, sampling=how, tenant="gone")).usage.cached_tokens
    await cluster.drain()
