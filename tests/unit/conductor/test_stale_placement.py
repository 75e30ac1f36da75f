"""A prefill instance whose queue is longer than reported does not take a prompt, which goes elsewhere."""

from moonpool.base.sampling_params import SamplingParams
from moonpool.v1 import conductor_pb2
from tests.unit.conductor.test_prediction_metrics import counts

from .fakes import decode, expected, prefill
from .stack import stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def test_a_prompt_goes_where_the_queue_is_as_it_was_told() -> None:
    idle = conductor_pb2.LoadReport(drain_s=0.0)
    busy, free, d = prefill(0, load=idle, queue_s=5.0), prefill(1, load=idle), decode()
    async with stack(busy, free, d) as s:
        told: list[None] = []
        tokens = s.client.stream(
            on_placed=lambda: told.append(None), token_ids=PROMPT, sampling=GREEDY, request_id="r1"
        )
        async for _ in tokens:
            assert tokens.placement is not None
            assert tokens.placement.prefill == "prefill-1"
        result = tokens.result
        assert result is not None
        assert result.token_ids == expected(len(PROMPT), 8)
        assert ([placement.prefill for placement in result.placements], len(told)) == (["prefill-1"], 1), (
            "it was placed once"
        )
        explanation = await s.client.explain("r1")
        assert explanation.placement is not None
        assert explanation.placement.prefill == "prefill-1"
        assert (await counts(s.metrics))[0] == 1.0
        [asked], [taken] = busy.requests, free.requests
        assert (taken.target, taken.sequence.request_id) == (asked.target, "r1")
        assert {gauge.name: gauge.value for gauge in await s.client.stats()}["stale_answers_total"] == 1
        await s.rest()
        assert d.reserved == {}
        assert d.cancelled == []
