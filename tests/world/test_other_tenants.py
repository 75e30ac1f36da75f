"""What a tenant can learn of another one's prompts from its own answers: nothing, on virtual time."""

from dataclasses import dataclass

import pytest

from moonpool.client import AsyncClient, SamplingParams
from tests.world.cluster import Cluster, Simulation, answer, prompt
from tests.world.process import on_virtual_time

TOKENS = 2000
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
LIKE = 0.2
"""Times that differ by less of their larger one are alike: messages take random times."""


@dataclass
class Seen:
    """What a client sees of an answer."""

    cached: int
    first_token_s: float


async def seen(client: AsyncClient, tokens: list[int], tenant: str, salt: str) -> Seen:
    result = await client.generate(token_ids=tokens, sampling=GREEDY, tenant=tenant, cache_salt=salt)
    assert result.token_ids == answer(tokens, GREEDY.max_tokens)
    return Seen(result.usage.cached_tokens, result.timing.ttft_s)


@pytest.mark.parametrize(("tenant", "salt"), [("eve", ""), ("ann", "other")], ids=["another tenant", "another salt"])
@pytest.mark.parametrize("both", [False, True], ids=["prefill and decode", "one engine"])
@on_virtual_time
async def test_a_prompt_that_another_has_sent_is_as_slow_as_a_new_one(
    simulation: Simulation, both: bool, tenant: str, salt: str
) -> None:
    """Neither engines nor kvstores give a prefix to others, so time and `cached_tokens` are those of a new prompt."""
    counts = {"prefill": 0, "kvstore": 1} if both else {"kvstore": 1}
    cluster = Cluster(simulation, counts, {"decode": ["--set", "computes_prompts=true"]} if both else {})
    await cluster.start()
    known, new = prompt(TOKENS, "known"), prompt(TOKENS, "new")
    async with AsyncClient(cluster.addresses) as client:
        first = await seen(client, known, "ann", "")
        await cluster.rest()
        own = await seen(client, known, "ann", "")
        others, fresh = await seen(client, known, tenant, salt), await seen(client, new, tenant, salt)
    assert own.cached > TOKENS / 2
    assert own.first_token_s < (1.0 - LIKE) * first.first_token_s, "one's own prefix is faster: the measure can tell"
    assert (others.cached, fresh.cached) == (0, 0)
    assert others.first_token_s == pytest.approx(fresh.first_token_s, rel=LIKE)
    assert others.first_token_s == pytest.approx(first.first_token_s, rel=LIKE)
