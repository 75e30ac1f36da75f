"""The SDK against a conductor in memory; nothing here touches the network."""

import contextlib
from collections.abc import Iterator

import pytest

from moonpool.base.errors import DeadlineExceeded
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import (
    AsyncClient,
    AsyncContexts,
    Choice,
    Client,
    Contexts,
    InvalidRequest,
    NotFound,
    Overloaded,
    Placement,
    Slo,
    StreamBroken,
    Unavailable,
)
from moonpool.client.failover import backoff_pauses
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.client.transport import NotConnected
from moonpool.client.types import GenerateArguments
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .conftest import Dial

OVERLOADED = Overloaded("no", reason="ttft_slo", predicted_ttft_s=9.0, slo_s=1.0, retry_after_s=8.0)

COVERED = {
    "Generate": "generate",
    "ClusterState": "cluster_state",
    "Explain": "explain",
    "ConductorStats": "stats",
    "DeleteKV": "delete_kv",
    "ChangeRole": "change_role",
    "DrainInstance": "drain",
    "UpdateSession": "update_session",
    "AnnouncePrompts": "announce",
    "LoadLoraAdapter": "load_lora_adapter",
    "UnloadLoraAdapter": "unload_lora_adapter",
}
CONTEXTS = {
    "CreateContext": "create",
    "UpdateContext": "update",
    "ListContexts": "list",
    "DeleteContext": "delete",
}
UNCOVERED = {"Join": "for instances only", "WatchKV": "for indexers only"}


def test_every_rpc_is_covered_or_left_out_on_purpose() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["ConductorService"].methods}
    assert methods == {*COVERED, *CONTEXTS, *UNCOVERED}
    assert len(methods) == len(COVERED) + len(CONTEXTS) + len(UNCOVERED)
    blocking, asynchronous = ({name for name in vars(kind) if name[0] != "_"} for kind in (Client, AsyncClient))
    assert set(COVERED.values()) | {"stream"} == blocking - {"close"} == asynchronous - {"aclose"}
    blocking, asynchronous = ({name for name in vars(kind) if name[0] != "_"} for kind in (Contexts, AsyncContexts))
    assert set(CONTEXTS.values()) | {"get"} == blocking == asynchronous


def test_a_whole_answer(dial: Dial) -> None:
    fake = FakeConductor(lambda _: answer((5, 6), request_id="r", prompt_tokens=7, cached_tokens=4))
    with dial(fake) as client:
        result = client.generate(prompt="hi")
    assert (result.request_id, result.token_ids, result.text, result.finish_reason) == ("r", [5, 6], "5 6 ", "stop")
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (7, 4, 2)
    assert (result.timing.ttft_s, result.timing.tpot_s) == (0.01, 0.001)
    assert result.placement == Placement("prefill-0", "decode-0")
    assert result.placements == (result.placement,)
    assert fake.cancelled == []


def test_several_answers(dial: Dial) -> None:
    deltas = [(0, 0, 5), (1, 0, 7), (1, 1, 8), (0, 1, 6)]
    messages = [
        pb.GenerateResponse(delta=pb.TokenDelta(choice=choice, position=position, token_ids=[token], text=f"{token} "))
        for choice, position, token in deltas
    ]
    reasons = (kv_pb2.FINISH_REASON_LENGTH, kv_pb2.FINISH_REASON_STOP)
    ends = [pb.FinishedChoice(reason=reason, completion_tokens=2) for reason in reasons]
    finished = pb.GenerateResponse(finished=pb.Finished(reason=reasons[0], choices=ends))
    fake = FakeConductor(lambda _: [*messages, finished])
    with dial(fake) as client:
        events = list(client.stream(prompt="hi", sampling=SamplingParams(n=2)))
        result = client.generate(prompt="hi", sampling=SamplingParams(n=2))
    assert [(event.choice, event.position, *event.token_ids) for event in events] == deltas
    assert result.choices == (Choice([5, 6], "5 6 ", "length"), Choice([7, 8], "7 8 ", "stop"))
    assert (result.token_ids, result.text, result.finish_reason) == ([5, 6], "5 6 ", "length")
    assert fake.requests[0].sampling.n == 2


def test_hypotheses_have_scores(dial: Dial) -> None:
    deltas = [
        pb.GenerateResponse(delta=pb.TokenDelta(choice=choice, token_ids=[token, 1], text=f"{token} "))
        for choice, token in enumerate((5, 7))
    ]
    stop = kv_pb2.FINISH_REASON_STOP
    ends = [pb.FinishedChoice(reason=stop, completion_tokens=2, score=score) for score in (0.0, -1.5)]
    finished = pb.GenerateResponse(finished=pb.Finished(reason=stop, choices=ends))
    fake = FakeConductor(lambda _: [*deltas, finished])
    with dial(fake) as client:
        result = client.generate(prompt="hi", sampling=SamplingParams(n=2, beam_width=4, early_stopping="never"))
    assert result.choices == (Choice([5, 1], "5 ", "stop", 0.0), Choice([7, 1], "7 ", "stop", -1.5))
    assert fake.requests[0].sampling == kv_pb2.Sampling(n=2, beam_width=4, early_stopping=kv_pb2.EARLY_STOPPING_NEVER)


def test_what_is_asked_reaches_the_conductor(dial: Dial) -> None:
    fake = FakeConductor()
    params = SamplingParams(
        max_tokens=2, temperature=0.5, stop="end", stop_token_ids=[3], logit_bias={4: 1.0}, seed=9, ignore_eos=True
    )
    with dial(fake) as client:
        client.generate(token_ids=[1, 2], sampling=params, slo=Slo(ttft_s=1.5), tenant="t", model="m", timeout_s=3.0)
        patient = Slo(tbt_s=0.1, queue_s=3.0)
        client.generate(messages=[{"role": "user", "content": "hi"}])
        client.generate(token_ids=[1], slo=patient, priority=-2)
    first, second, third = fake.requests
    assert list(first.tokens.token_ids) == [1, 2]
    assert first.sampling == kv_pb2.Sampling(
        max_tokens=2, temperature=0.5, stop=["end"], stop_token_ids=[3], logit_bias={4: 1.0}, seed=9, ignore_eos=True
    )
    assert (first.slo, first.tenant, first.model) == (pb.Slo(ttft_s=1.5), "t", "m")
    assert fake.timeouts_s[0] == pytest.approx(3.0, abs=0.5)
    assert second.chat.messages == [pb.ChatMessage(role="user", content="hi")]
    assert second.sampling == kv_pb2.Sampling()
    assert (third.slo, third.priority, first.priority) == (pb.Slo(tbt_s=0.1, queue_s=3.0), -2, 0)
    assert not second.HasField("slo")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": [1 << 40]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"prompt": "x" * (9 << 20)}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * (9 << 20)}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages"),
        ({"prompt": "a", "sampling": SamplingParams(max_tokens=1 << 40)}, "sampling.max_tokens"),
        ({"prompt": "a", "sampling": SamplingParams(logit_bias={"a": 1.0})}, "sampling.logit_bias"),  # type: ignore[dict-item]
        ({"prompt": "a", "slo": Slo(ttft_s="soon")}, "slo.ttft_s"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_the_contract_is_named(dial: Dial, given: dict[str, object], field: str) -> None:
    with dial(FakeConductor()) as client, pytest.raises(InvalidRequest) as caught:
        client.generate(**given)
    assert caught.value.field == field


@pytest.mark.parametrize(("tokens", "count", "portions"), [(1, 300, [256, 44]), (1_000_000, 3, [1, 1, 1]), (1, 0, [])])
def test_many_prompts_are_announced_in_portions(dial: Dial, tokens: int, count: int, portions: list[int]) -> None:
    fake = FakeConductor()
    fake.answers["AnnouncePromptsRequest"] = pb.AnnouncePromptsResponse(prompts=1)
    given: list[GenerateArguments] = [{"token_ids": [1 << 20] * tokens} for _ in range(count)]
    with dial(fake) as client:
        assert client.announce(given, 5.0, tenant="t") == len(portions)
    asked = [request for request in fake.asked if isinstance(request, pb.AnnouncePromptsRequest)]
    assert [len(request.requests) for request in asked] == portions
    assert {(request.tenant, request.within_s) for request in asked} <= {("t", 5.0)}


def test_an_unknown_argument_is_refused(dial: Dial) -> None:
    with dial(FakeConductor()) as client, pytest.raises(TypeError, match="max_tokens"):
        client.generate(prompt="a", max_tokens=3)


def test_streaming_gives_every_delta_and_then_the_result(dial: Dial) -> None:
    with dial(FakeConductor()) as client:
        stream = client.stream(token_ids=[1])
        assert stream.result is None
        assert stream.placement is None
        events = [(event.position, event.token_ids, event.text) for event in stream]
        assert events == [(0, (1,), "1 "), (1, (2,), "2 "), (2, (3,), "3 ")]
        assert stream.result is not None
        assert stream.result.text == "1 2 3 "
        assert stream.request_id == "fake"
        with pytest.raises(RuntimeError, match="once"):
            iter(stream)


def test_leaving_the_iteration_cancels(dial: Dial) -> None:
    fake = FakeConductor()
    with dial(fake) as client:
        for _ in client.stream(prompt="break"):
            break
        kept = client.stream(prompt="kept")
        for _ in kept:
            break
        with client.stream(prompt="closed") as stream:
            events = iter(stream)
            next(events)
        assert list(events) == []
        with contextlib.suppress(KeyError):
            for _ in client.stream(prompt="raised"):
                raise KeyError
        with client.stream(prompt="never begun"):
            pass
    assert [request.text for request in fake.cancelled] == ["break", "kept", "closed", "raised"]
    assert len(fake.requests) == 4


def test_errors_come_through_as_they_are(dial: Dial) -> None:
    fake = FakeConductor(lambda _: [OVERLOADED])
    with dial(fake) as client:
        with pytest.raises(Overloaded) as caught:
            client.generate(prompt="hi")
        assert (caught.value.reason, caught.value.retry_after_s) == ("ttft_slo", 8.0)
        with pytest.raises(NotFound):
            client.explain("nobody")


def script(*scripts: Script) -> FakeConductor:
    remaining: Iterator[Script] = iter(scripts)
    return FakeConductor(lambda _: next(remaining))


def test_an_unreachable_conductor_is_tried_again_before_any_answer(dial: Dial) -> None:
    fake = script([NotConnected("down")], [NotConnected("down")], answer())
    with dial(fake, connect_timeout_s=1.0) as client:
        assert client.generate(prompt="hi").token_ids == [1, 2, 3]
    assert len(fake.requests) == 3


def test_tries_are_bounded_and_an_answer_of_the_conductor_is_final(dial: Dial) -> None:
    with dial(script([NotConnected("down")]), connect_timeout_s=0.0) as client, pytest.raises(Unavailable):
        client.generate(prompt="hi")
    fake = script([Unavailable("no engines")], answer())
    with dial(fake, connect_timeout_s=1.0) as client, pytest.raises(Unavailable, match="no engines"):
        client.generate(prompt="hi")
    begun = script([*answer()[:2], NotConnected("broke")], answer())
    with dial(begun, connect_timeout_s=1.0) as client, pytest.raises(Unavailable, match="broke"):
        client.generate(prompt="hi")
    assert len(begun.requests) == 1


def test_the_deadline_bounds_the_tries(dial: Dial) -> None:
    fake = script([NotConnected("down")], answer())
    with dial(fake, connect_timeout_s=60.0) as client:
        with pytest.raises(Unavailable):
            client.generate(prompt="hi", timeout_s=0.01)
        with pytest.raises(DeadlineExceeded):
            client.generate(prompt="hi", timeout_s=0.0)


def test_backoffs_double_and_sum_up_to_the_limit() -> None:
    assert list(backoff_pauses(0.7)) == [0.05, 0.1, 0.2]
    assert list(backoff_pauses(0.0)) == []
    assert max(backoff_pauses(10.0)) == 1.0


def test_log_probabilities_of_a_prompt_are_those_of_its_tokens(dial: Dial) -> None:
    first, *rest = answer()
    told = pb.PromptLogprobs(token_ids=[1, 2, 3])
    told.logprobs.CopyFrom(kv_pb2.Logprobs(logprobs=[-1, -2], ranks=[1, 2], top_token_ids=[7, 8], top_logprobs=[0, -1]))
    with dial(FakeConductor(lambda _: [first, pb.GenerateResponse(prompt_logprobs=told), *rest])) as client:
        assert client.generate(prompt="hi").prompt_logprobs == [
            None, TokenLogprobs(2, -1.0, 1, ((7, 0.0),)), TokenLogprobs(3, -2.0, 2, ((8, -1.0),)),
        ]  # fmt: skip
        del told.logprobs.top_logprobs[-1]
        with pytest.raises(StreamBroken, match="not those of 2 tokens"):
            client.generate(prompt="hi")


def test_lost_tokens_and_early_ends_are_noticed(dial: Dial) -> None:
    messages = answer()
    with dial(FakeConductor(lambda _: messages[:-1])) as client, pytest.raises(StreamBroken, match="ended before"):
        client.generate(prompt="hi")
    gap = [messages[0], messages[2], messages[-1]]
    with dial(FakeConductor(lambda _: gap)) as client, pytest.raises(StreamBroken, match="expected token 0"):
        client.generate(prompt="hi")


def test_a_cancelled_answer_says_so(dial: Dial) -> None:
    fake = FakeConductor(lambda _: answer((1,), reason=kv_pb2.FINISH_REASON_CANCELLED))
    with dial(fake) as client:
        assert client.generate(prompt="hi").finish_reason == "cancelled"


def test_a_new_placement_is_told(dial: Dial) -> None:
    messages = answer((1, 2))
    again = pb.Placed(request_id="fake", placement=pb.Placement(prefill="prefill-1", decode="decode-0"))
    final = pb.GenerateResponse()
    final.CopyFrom(messages[-1])
    final.finished.placement.CopyFrom(again.placement)
    fake = FakeConductor(lambda _: [*messages[:2], pb.GenerateResponse(placed=again), messages[2], final])
    with dial(fake) as client:
        result = client.generate(prompt="hi")
    assert [placement.prefill for placement in result.placements] == ["prefill-0", "prefill-1"]
    assert result.token_ids == [1, 2]


def test_queries_are_translated(dial: Dial) -> None:
    fake = FakeConductor()
    instance = kv_pb2.Instance(id="decode-0", kind=kv_pb2.INSTANCE_KIND_DECODE, address="h:1", epoch=3)
    fake.state = pb.ClusterStateResponse(
        ready=True,
        model=pb.ModelInfo(name="tiny", max_tokens=64, layout=kv_pb2.KVLayout(block_size=16)),
        instances=[pb.InstanceState(instance=instance, load=pb.LoadReport(running=2), indexed_blocks=5)],
    )
    fake.explanations["r"] = pb.ExplainResponse(refused="too slow", candidates=[pb.CandidateExplanation(instance="p")])
    fake.gauges = pb.ConductorStatsResponse(
        gauges=[kv_pb2.Gauge(name="a", value=1, at_rest=0), kv_pb2.Gauge(name="b", value=2)]
    )
    with dial(fake) as client:
        state = client.cluster_state()
        assert (state.ready, state.model, state.max_tokens, state.block_size) == (True, "tiny", 64, 16)
        assert [(i.id, i.kind, i.running, i.indexed_blocks) for i in state.instances] == [("decode-0", "decode", 2, 5)]
        explanation = client.explain("r")
        assert (explanation.placement, explanation.refused) == (None, "too slow")
        assert [candidate.instance for candidate in explanation.candidates] == ["p"]
        assert [(g.name, g.value, g.at_rest) for g in client.stats()] == [("a", 1.0, 0.0), ("b", 2.0, None)]
