"""The client's trace goes on with its request."""

import pytest

from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.client.tracing import traceparent
from moonpool.v1 import conductor_pb2 as pb

from .fakes import answering

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (TRACE, TRACE),
        (TRACE + "-later", TRACE + "-later"),
        ("", ""),
        ("nonsense", ""),
        (TRACE.upper(), ""),
        ("ff" + TRACE[2:], ""),
        (TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), ""),
        (TRACE + "-" + "x" * 1000, ""),
    ],
)
async def test_traceparent(given: str, passed: str) -> None:
    """What is none is dropped, as the standard has it; and it does not outlive its request."""
    seen: list[str] = []

    def script(_: pb.GenerateRequest) -> Script:
        seen.append(traceparent.get())
        return answer()

    async with answering(FakeConductor(script)) as gateway:
        gateway.http.headers["traceparent"] = given
        assert (await gateway.chat()).status_code == 200
        del gateway.http.headers["traceparent"]
        assert (await gateway.chat(stream=True)).status_code == 200
    assert seen == [passed, ""]
    assert traceparent.get() == ""
