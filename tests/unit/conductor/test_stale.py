"""A prefill instance that is busier than it has told says so when it is asked, and the prompt goes elsewhere."""

from moonpool.client import SamplingParams
from moonpool.v1 import conductor_pb2

from .fakes import decode, expected, prefill
from .stack import stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def test_a_prompt_goes_where_the_queue_is_as_it_was_told() -> None:
    idle = conductor_pb2.LoadReport(drain_s=0.0)
    busy, free, d = prefill(0, load=idle, queue_s=5.0), prefill(1, load=idle), decode()
    async with stack(busy, free, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r1")
        assert result.token_ids == expected(len(PROMPT), 8)
        assert result.placement.prefill == "prefill-1"
        [asked], [taken] = busy.requests, free.requests
        assert (taken.target, taken.sequence.request_id) == (asked.target, "r1")
        assert {gauge.name: gauge.value for gauge in await s.client.stats()}["stale_answers"] == 1
        await s.rest()
        assert d.reserved == {}
        assert d.cancelled == []
