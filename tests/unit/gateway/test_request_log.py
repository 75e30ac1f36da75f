"""Requests that were refused, were wrong or failed have a line in the log; with `log_requests` all have."""

from typing import Any, cast

import httpx2
import pytest

from moonpool.base.errors import Overloaded
from moonpool.client.testing import FakeConductor, answer

from .fakes import CHAT, TURNS, Answers, answering


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines so far, by their fields."""
    return [cast("dict[str, Any]", record.msg) for record in caplog.records if record.name.endswith("request_log")]


async def test_refused_and_wrong_requests_are_found_by_the_clients_id(
    gateway: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    full = Overloaded("full", reason="queue_full", retry_after_s=1.0)
    async with answering(FakeConductor(lambda _: iter([full]))) as refusing:
        for stream in (False, True):
            body = {"messages": TURNS, "stream": stream}
            await refusing.http.post(CHAT, json=body, headers={"x-request-id": f"refused-{stream}"})
    await gateway.http.post(CHAT, json={"messages": "my secret"}, headers={"x-request-id": "wrong"})
    await gateway.http.get("/no/page", headers={"x-request-id": "lost"})
    await gateway.http.post(CHAT, json={"messages": TURNS}, headers={"x-request-id": "good"})
    found = {line["request"]: line for line in lines(caplog)}
    told = {name: (line["status"], line["code"], line["path"]) for name, line in found.items()}
    assert told == {
        "refused-False": (429, "queue_full", CHAT),
        "refused-True": (429, "queue_full", CHAT),
        "wrong": (400, "invalid_value", CHAT),
        "lost": (404, "unknown_url", "none"),
    }
    assert found["refused-True"]["full_id"].startswith("refused-True-")
    assert found["wrong"]["parameter"] == "messages"
    assert "my secret" not in str(lines(caplog))


async def test_with_log_requests_an_answer_has_a_line_and_a_scrape_has_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fake = FakeConductor(lambda _: answer([5, 6, 7], prompt_tokens=9, cached_tokens=8))
    async with answering(fake, log_requests=True) as gateway:
        for stream in (False, True):
            await gateway.chat(stream=stream)
        await gateway.http.get("/metrics")
    whole, streamed = lines(caplog)
    assert (whole["stream"], streamed["stream"]) == (False, True)
    for line in (whole, streamed):
        assert (line["status"], line["finish_reason"], line["tenant"]) == (200, "stop", "")
        assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (9, 8, 3)
        assert (line["prefill"], line["decode"]) == ("prefill-0", "decode-0")
        assert line["ttft_s"] == 0.01


async def test_every_error_has_a_line_where_there_are_many(gateway: Answers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for number in range(100):
        await gateway.http.post(CHAT, json={}, headers={"x-request-id": f"r{number}"})
    assert [line["request"] for line in lines(caplog)] == [f"r{number}" for number in range(100)]


async def test_a_defect_has_an_answer_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def script(request: object) -> list[Any]:
        raise ValueError("a defect")

    async with answering(FakeConductor(script)) as gateway:
        transport = httpx2.ASGITransport(gateway.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
            answered = await http.post(CHAT, json={"messages": TURNS}, headers={"x-request-id": "met"})
    assert answered.status_code == 500
    assert answered.json()["error"]["type"] == "server_error"
    assert "a defect" not in answered.text
    [line] = lines(caplog)
    assert (line["request"], line["status"], line["path"]) == ("met", 500, CHAT)
