"""A defect that one request meets ends that request, with the reason, and no other one; and what no request may say."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.base.errors import Internal
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import Step, StepResult
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.telemetry.spans import Recorder
from moonpool.engine.decode.core.actions import StartRun
from moonpool.engine.decode.core.events import AbortRequest
from moonpool.engine.decode.run_loop import RunLoop
from moonpool.engine.decode.speculation import DraftPlanner
from moonpool.engine.histograms import EngineHistograms
from moonpool.engine.instance import ExecutorParts
from moonpool.engine.subscriber import Subscriber
from moonpool.v1 import decode_pb2, kv_pb2
from tests.unit.engine.decode.calls import Conductor, conducting, reserve, transfer
from tests.unit.fakes.engine import GARBLED, continuation
from tests.unit.instances import Decode, decoding, prompt, spec


async def only_b_goes_on(decode: Decode, conductor: Conductor, specs: Sequence[kv_pb2.SequenceSpec]) -> None:
    """Starts "a", which meets a defect, and "b"; returns when the one failed, the other ended, and all is free."""
    for each, target in [(each, await reserve(decode, each)) for each in specs]:
        tokens = array("i", each.token_ids).tolist()
        await transfer(decode, target, tokens)
        await conductor.start(each.request_id, target, continuation(tokens, 6)[0])
    await conductor.until(lambda: "a" in conductor.failed and "b" in conductor.reasons)
    await decode.rest()


async def test_tokens_that_cannot_be_taken_end_their_request_alone() -> None:
    tokens = {name: prompt(20, seed) for seed, name in enumerate("ab")}
    broken = spec("a", tokens["a"], max_tokens=6)
    broken.sampling.response_format, broken.sampling.grammar = "regex", GARBLED
    async with decoding() as decode, conducting(decode) as conductor:
        await only_b_goes_on(decode, conductor, [broken, spec("b", tokens["b"], max_tokens=6)])
        assert conductor.failed == {"a": "a defect: its tokens cannot be taken"}
        assert conductor.tokens == {"b": continuation(tokens["b"], 6)[1:]}


async def test_after_a_defect_nothing_is_taken_also_where_the_core_hears_of_it_later() -> None:
    """As where many events wait for the core: no later token is told as if none was missing before it."""
    taken: list[int] = []
    ends: list[str] = []
    posted: list[Any] = []

    def append(token: int, _: object) -> None:
        if token == 1:
            raise KeyError("a defect")
        taken.append(token)

    request: Any = SimpleNamespace(request_id="a", ending=False, search=None)
    sequence: Any = SimpleNamespace(
        id=7, request=request, tokens=[0], most_steps=lambda _: 9, step=lambda *_, **__: None, take_filled=lambda _: [],
        append=append, check_finish=lambda _: 0, send_new=lambda: taken.append(-1),
    )  # fmt: skip

    async def run(_: Step, on_step: Any) -> StepResult:
        first, second, third = (StepResult((token,), False, 0, 1) for token in (1, 2, 3))
        on_step(first)
        return replace(third, earlier=(second,))

    engine: Any = SimpleNamespace(run=run, layout=SimpleNamespace(block_size=16))
    live: Any = SimpleNamespace(sequences={7: sequence})
    outside: Any = None
    histograms = EngineHistograms(PrometheusMetrics("decode"), "decode")
    parts = ExecutorParts(engine, outside, Recorder("d", None), histograms, lambda *, soon=False: None)
    drafts = DraftPlanner(1, Speeds)
    running = RunLoop(parts, live, 99, posted.append, lambda _, why: ends.append(why), drafts)
    running.order(StartRun(1, (7,), steps=3))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await running.run()
    assert (taken, ends) == ([], ["a defect: its tokens cannot be taken"])
    assert [type(event).__name__ for event in posted] == ["RunProgress", "RunProgress", "RunDone"]


@pytest.mark.parametrize(("run_steps", "at_once"), [(1, False), (4, False), (1, True)])
async def test_tokens_that_cannot_be_told_end_their_request_alone(run_steps: int, *, at_once: bool) -> None:
    """Also where the answer ends with its first token, at once: then the core is done with it already."""
    tokens = {name: prompt(20, seed) for seed, name in enumerate("ab")}
    what = "answer cannot be told" if at_once else "tokens cannot be taken"
    async with decoding(run_steps=run_steps) as decode, conducting(decode) as conductor:
        start = decode.service.executor.start

        def starts(subscriber: Subscriber, message: decode_pb2.StartSequence) -> None:
            tells = subscriber.tokens

            def told(request_id: str, *positional: Any, **more: Any) -> None:
                if request_id == "a":
                    raise KeyError("a defect")
                tells(request_id, *positional, **more)

            if message.request_id == "a":
                subscriber.tokens = told  # type: ignore[method-assign]
            start(subscriber, message)

        decode.service.executor.start = starts  # type: ignore[method-assign]
        ends = {"a": [continuation(tokens["a"], 1)[0]] if at_once else [], "b": []}
        await only_b_goes_on(
            decode, conductor, [spec(name, tokens[name], max_tokens=6, ends=ends[name]) for name in "ab"]
        )
        assert conductor.failed == {"a": f"a defect: its {what}"}
        assert conductor.tokens == {"b": continuation(tokens["b"], 6)[1:]}


async def test_an_order_that_cannot_be_carried_out_ends_its_request_alone() -> None:
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        start = decode.service.executor.start

        def starts(subscriber: Subscriber, message: decode_pb2.StartSequence) -> None:
            if message.request_id == "a":
                raise KeyError("a defect")
            start(subscriber, message)

        decode.service.executor.start = starts  # type: ignore[method-assign]
        await only_b_goes_on(decode, conductor, [spec(name, tokens, max_tokens=6) for name in "ab"])
        assert conductor.failed == {"a": "a defect: its start cannot be carried out"}
        assert conductor.tokens["b"] == continuation(tokens, 6)[1:]


async def test_a_core_that_fails_outside_a_request_ends_the_instance() -> None:
    """Nobody would compute any more, and nobody would know."""
    async with decoding() as decode, conducting(decode):
        handle, executor = decode.service.core.handle, decode.service.executor

        def fails(now: float, event: Any, out: list[Any]) -> None:
            if isinstance(event, AbortRequest):
                raise KeyError("the core has a defect")
            handle(now, event, out)

        decode.service.core.handle = fails  # type: ignore[method-assign]
        target = await reserve(decode, spec("a", prompt(20)))
        live = executor.get(target.transfer_id, target.generation)
        assert live is not None
        executor.abort(live, "nobody wants it")
        await decode.until(lambda: decode.death is not None)
        assert isinstance(decode.death, Internal)
        decode.service.core.handle = handle  # type: ignore[method-assign]


async def test_more_known_tokens_than_the_answer_may_have_are_refused() -> None:
    tokens = prompt(20)
    answer = continuation(tokens, 8)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=6))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0], known=[answer[1:7]])
        await conductor.until(lambda: "a" in conductor.failed)
        assert conductor.failed == {"a": "6 tokens are known behind a first one: the answer has at most 6"}
        await conductor.cancel("a", target)
        await conductor.until(lambda: "a" in conductor.outcomes)
        await decode.rest()
