"""A conductor in memory, for tests of programs that use the SDK: no network and no model.

fake = FakeConductor()
with fake.client() as client:
    assert client.generate(prompt="hi").token_ids == [1, 2, 3]
assert fake.requests[0].text == "hi"
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from google.protobuf.message import Message

from moonpool.base.errors import NotFound, Unsupported
from moonpool.client.client import AsyncClient, Client
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

Script = Iterable[pb.GenerateResponse | Exception]
"""One answer's messages, in order. An exception among the messages is raised in turn."""


def answer(
    token_ids: Iterable[int] = (1, 2, 3),
    *,
    request_id: str = "fake",
    reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_STOP,
    prompt_tokens: int = 1,
    cached_tokens: int = 0,
    loaded_tokens: int = 0,
    from_position: int = 0,
    seed: int = 0,
) -> list[pb.GenerateResponse]:
    """An answer's messages, one for each token, from a position on. Token n has the text "n "."""
    tokens = list(token_ids)
    placement = pb.Placement(prefill="prefill-0", decode="decode-0")
    placed = pb.Placed(request_id=request_id, placement=placement, prompt_tokens=prompt_tokens, seed=seed)
    placed.resume.CopyFrom(pb.ResumePoint(placement=placement, sequence=request_id, secret=b"not a secret at all"))
    deltas = [
        pb.TokenDelta(position=position, token_ids=[token], text=f"{token} ")
        for position, token in enumerate(tokens)
        if position >= from_position
    ]
    if deltas:
        deltas[-1].reason = reason
    finished = pb.Finished(
        reason=reason,
        usage=pb.Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=len(tokens),
            loaded_tokens=loaded_tokens,
        ),
        timing=pb.Timing(ttft_s=0.01, tpot_s=0.001, e2e_s=0.02),
        placement=placement,
    )
    return [
        pb.GenerateResponse(placed=placed),
        *(pb.GenerateResponse(delta=delta) for delta in deltas),
        pb.GenerateResponse(finished=finished),
    ]


class FakeConductor:
    """A fake conductor: answers requests by a script, and records all requests and the cancelled requests."""

    def __init__(self, script: Callable[[pb.GenerateRequest], Script] | None = None) -> None:
        """Answer with `script(request)`. Default: the tokens 1, 2, 3, at most `max_tokens`."""
        self._script = script or _default_script
        self.requests: list[pb.GenerateRequest] = []
        self.timeouts_s: list[float] = []
        self.cancelled: list[pb.GenerateRequest] = []
        """Requests that were cancelled before their end."""
        self.state = pb.ClusterStateResponse(ready=True)
        self.explanations: dict[str, pb.ExplainResponse] = {}
        self.gauges = pb.ConductorStatsResponse()
        self.asked: list[Message] = []
        """Requests from other calls, for example for contexts.

        `answers` has the response by the name of the request.
        """
        self.answers: dict[str, Message | Exception] = {}

    def client(
        self,
        *others: FakeConductor,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 0.0,
        resume_timeout_s: float = 0.0,
    ) -> Client:
        """A client for this conductor, and for `others` if this conductor is lost."""
        return Client(
            transport=[_FakeTransport(fake) for fake in (self, *others)],
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            resume_timeout_s=resume_timeout_s,
        )

    def async_client(
        self,
        *others: FakeConductor,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 0.0,
        resume_timeout_s: float = 0.0,
    ) -> AsyncClient:
        """A client for this conductor, and for `others` if this conductor is lost."""
        return AsyncClient(
            transport=[_FakeTransport(fake) for fake in (self, *others)],
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            resume_timeout_s=resume_timeout_s,
        )

    def begin(self, request: pb.GenerateRequest, timeout_s: float) -> FakeCall:
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)
        return FakeCall(self, request, iter(self._script(request)))

    def answer(self, request: Message) -> Message:
        """The response to any call but Generate; raises MoonpoolError."""
        match request:
            case pb.ExplainRequest():
                return self.explain(request)
            case pb.ClusterStateRequest():
                return self.state
            case pb.ConductorStatsRequest():
                return self.gauges
        self.asked.append(request)
        found = self.answers.get(type(request).__name__)
        if found is None:
            raise Unsupported(f"the fake has no answer to {type(request).__name__}")
        if isinstance(found, Exception):
            raise found
        return found

    def explain(self, request: pb.ExplainRequest) -> pb.ExplainResponse:
        """The response that `explanations` has; raises NotFound."""
        if request.request_id not in self.explanations:
            raise NotFound(f"no decision about request {request.request_id!r}")
        return self.explanations[request.request_id]


class FakeCall:
    """A running call of Generate."""

    def __init__(
        self, fake: FakeConductor, request: pb.GenerateRequest, script: Iterator[pb.GenerateResponse | Exception]
    ) -> None:
        self._fake = fake
        self._request = request
        self._script = script
        self._over = False

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        step = None if self._over else next(self._script, None)
        if step is None:
            self._over = True
            raise StopAsyncIteration
        if isinstance(step, Exception):
            self._over = True
            raise step
        return step

    def cancel(self) -> None:
        """End the call. A call that was not over is recorded as cancelled."""
        if not self._over:
            self._over = True
            self._fake.cancelled.append(self._request)


class _FakeTransport:
    def __init__(self, fake: FakeConductor) -> None:
        self._fake = fake

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> FakeCall:
        return self._fake.begin(request, timeout_s)

    async def query(self, request: Message, timeout_s: float) -> Any:
        return self._fake.answer(request)

    async def aclose(self) -> None:
        """Return at once: a fake conductor has no connection to close."""


def _default_script(request: pb.GenerateRequest) -> Script:
    limit = request.sampling.max_tokens or 3
    start = request.from_position
    return answer((1, 2, 3)[:limit], request_id=request.request_id or "fake", from_position=start)
