"""Sessions: by which fields and headers clients name them, and what reaches the conductor."""

from typing import Any

import pytest

from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, PLAIN, TURNS, Answers, answering, tokenizer

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    PLAIN: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": TURNS, "max_tokens": 5},
}
TURN = pb.SessionTurn
CACHE = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, None),
        ({}, {"x-session-id": "s"}, TURN(id="s")),
        ({}, {"x-claude-code-session-id": "s"}, TURN(id="s")),
        ({"session": {"id": "t"}}, {"x-session-id": "s"}, TURN(id="t")),
        (
            {"session": {"return_s": 2, "keep_s": 9.5, "last": True, "retention": -3}},
            {"x-session-id": "s"},
            TURN(id="s", return_s=2, keep_s=9.5, last=True, retention=-3),
        ),
    ],
)
async def test_every_api_takes_a_session(
    gateway: Answers, path: str, body: dict[str, Any], headers: dict[str, str], expected: pb.SessionTurn | None
) -> None:
    answered = await gateway.http.post(path, json={**BODIES[path], **body}, headers=headers)
    assert answered.status_code == 200
    assert "warning" not in answered.headers
    assert (gateway.asked.session if gateway.asked.HasField("session") else None) == expected


@pytest.mark.parametrize("path", [CHAT, PLAIN, RESPONSES])
async def test_openais_prompt_cache(gateway: Answers, path: str) -> None:
    given = {"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "30m", "mode": "implicit"}}
    answered = await gateway.http.post(path, json={**BODIES[path], **given})
    assert answered.headers["warning"] == '299 moonpool "ignored fields: prompt_cache_options.mode"'
    assert gateway.asked.session == TURN(id="k", keep_s=1800)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_vllms_session_id_goes_before_the_cache_key(gateway: Answers, path: str) -> None:
    given = {"prompt_cache_key": "k", "session_id": "s", "prompt_cache_retention": "24h"}
    await gateway.http.post(path, json={**BODIES[path], **given})
    assert gateway.asked.session == TURN(id="s", keep_s=86_400)


@pytest.mark.parametrize(
    ("field", "value"),
    [("session.keep", 1), ("session.return_s", "2"), ("prompt_cache_options.ttl", "soon"), ("session_id", 3)],
)
async def test_wrong_sessions_are_refused_by_name(gateway: Answers, field: str, value: object) -> None:
    name, _, member = field.partition(".")
    refused = await gateway.chat(**{name: {member: value} if member else value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_a_session_is_updated_and_ended_by_its_name(gateway: Answers) -> None:
    told = gateway.fake.answers["UpdateSessionRequest"] = pb.UpdateSessionResponse(found=True)
    updated = await gateway.http.post("/moonpool/sessions/a/b", json={"return_s": 4})
    ended = await gateway.http.delete("/moonpool/sessions/a/b")
    assert [(reply.status_code, reply.json()["ended"]) for reply in (updated, ended)] == [(200, False), (200, True)]
    turns = TURN(id="a/b", return_s=4), TURN(id="a/b", last=True)
    assert gateway.fake.asked == [pb.UpdateSessionRequest(session=turn) for turn in turns]
    told.found = False
    assert (await gateway.http.delete("/moonpool/sessions/a")).status_code == 404


def texts(*blocks: tuple[str, dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Text blocks, each with a breakpoint or None."""
    return [{"type": "text", "text": text, **({"cache_control": mark} if mark else {})} for text, mark in blocks]


async def usage_of(prompt_tokens: int, cached: int, **body: Any) -> tuple[list[int], pb.GenerateRequest]:
    """Usage of a message: not cached, computed up to breakpoints of 5 minutes and of an hour, cached."""
    fake = FakeConductor(lambda _: answer([5], prompt_tokens=prompt_tokens, cached_tokens=cached))
    async with answering(fake) as gateway:
        answered = await gateway.http.post(MESSAGES, json={"messages": TURNS, "max_tokens": 5, **body})
        assert answered.status_code == 200, answered.text
        usage, asked = answered.json()["usage"], gateway.asked
    split = usage["cache_creation"]
    minutes, hour = split["ephemeral_5m_input_tokens"], split["ephemeral_1h_input_tokens"]
    assert usage["cache_creation_input_tokens"] == minutes + hour
    return [usage["input_tokens"], minutes, hour, usage["cache_read_input_tokens"]], asked


@pytest.mark.parametrize(
    ("mark", "keep_s", "expected"),
    [(CACHE, 300, [0, 60, 0, 40]), (HOUR, 3600, [0, 0, 60, 40]), (None, 0, [60, 0, 0, 40])],
)
async def test_a_breakpoint_at_the_prompts_end(mark: dict[str, Any] | None, keep_s: float, expected: list[int]) -> None:
    last = [{"role": "user", "content": texts(("a", None), ("b", mark))}]
    marked, asked = await usage_of(100, 40, messages=last)
    assert marked == expected
    assert asked.session.keep_s == keep_s
    automatic, _ = await usage_of(100, 40, cache_control=mark)
    assert automatic == expected


async def test_breakpoints_of_an_hour_before_those_of_five_minutes() -> None:
    """The system prompt for an hour, the first turn for five minutes, and a question behind both."""
    system, first, question = "You mend files. " * 3, "read the file a", "and now b?"
    body = {
        "system": texts((system, HOUR)),
        "messages": [{"role": "user", "content": [*texts((first, CACHE)), *texts((question, None))]}],
    }
    chat = tokenizer().render_chat(
        [{"role": "system", "content": system}, {"role": "user", "content": f"{first}\n{question}"}]
    )
    behind = [len(tokenizer().encode(chat.text.partition(text)[2], False)) for text in (system, first)]
    prompt = len(tokenizer().encode(chat.text))
    assert 0 < behind[1] < behind[0] < prompt
    hour, minutes = prompt - behind[0], behind[0] - behind[1]
    assert (await usage_of(prompt, 0, **body))[0] == [behind[1], minutes, hour, 0]
    assert (await usage_of(prompt, 5, **body))[0] == [behind[1], minutes, hour - 5, 5]
    assert (await usage_of(prompt, hour + 3, **body))[0] == [behind[1], minutes - 3, 0, hour + 3]
    assert (await usage_of(prompt, prompt - 1, **body))[0] == [1, 0, 0, prompt - 1]


async def test_a_tools_breakpoint_counts_as_the_system_prompts() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": HOUR}
    _, asked = await usage_of(100, 0, tools=[tool], tool_choice={"type": "none"}, system="Mend files.")
    assert asked.session.keep_s == 3600


async def test_a_wrong_ttl_is_refused_by_name(gateway: Answers) -> None:
    given = {**BODIES[MESSAGES], "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    refused = await gateway.http.post(MESSAGES, json=given)
    assert refused.status_code == 400
    assert "cache_control.ttl" in refused.json()["error"]["message"]
