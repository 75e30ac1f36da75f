"""Kimi's context caching over HTTP: the shapes of caches and tags, and chats that name one."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from moonpool.base.errors import NotFound
from moonpool.base.rpc.api_keys import hash_key
from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb

from .fakes import Answers, answering

SYSTEM = {"role": "system", "content": "You know the law."}
ASK = {"role": "user", "content": "Well?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CACHE = "/v1/caching"


def context(name: str = "cache-1", created_at: float = 100.0, *, tools: bool = False, **made: Any) -> pb.Context:
    """What a conductor tells of a context."""
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role=SYSTEM["role"], content=SYSTEM["content"])],
        tools=json.dumps([TOOL]) if tools else "",
    )
    return pb.Context(
        id=name,
        made=pb.CreateContextRequest(chat=chat, tenant="", **made),
        status=pb.CONTEXT_STATUS_READY,
        created_at=created_at,
        expires_at=2000.0,
        tokens=70,
        blocks=4,
        pinned_blocks=4,
        pinned_bytes=400,
        hits=3,
        saved_tokens=192,
        model="tiny",
    )


def knowing(*contexts: pb.Context, cached_tokens: int = 64) -> FakeConductor:
    """A conductor with contexts, and answers that found cached tokens."""
    fake = FakeConductor(lambda _: answer((1, 2), prompt_tokens=90, cached_tokens=cached_tokens))
    fake.answers["ListContextsRequest"] = pb.ListContextsResponse(contexts=contexts)
    return fake


async def test_a_cache_is_made_and_told_as_kimi_does() -> None:
    fake = FakeConductor()
    made = context(name="cache-1", tags=["law"], description="d", metadata={"case": "7"}, tools=True)
    made.made.name = "n"
    fake.answers["CreateContextRequest"] = pb.CreateContextResponse(context=made)
    body = {"model": "tiny", "messages": [SYSTEM], "tools": [TOOL], "name": "n", "ttl": 60, "metadata": {"case": "7"}}
    async with answering(fake) as gateway:
        response = await gateway.http.post(CACHE, json={**body, "tags": ["law"], "shape": 1})
    assert response.status_code == 200
    assert response.headers["warning"].endswith('"ignored fields: shape"')
    assert response.json() == {
        "id": "cache-1", "object": "context_cache_object", "status": "ready", "created_at": 100, "expired_at": 2000,
        "tokens": 70, "model": "tiny", "messages": [SYSTEM], "tools": [TOOL], "name": "n", "description": "d",
        "metadata": {"case": "7"}, "error": None,
        "moonpool": {
            "tags": ["law"], "hits": 3, "saved_tokens": 192, "blocks": 4, "pinned_blocks": 4, "pinned_bytes": 400,
        },
    }  # fmt: skip
    (asked,) = fake.asked
    assert isinstance(asked, pb.CreateContextRequest)
    assert (asked.ttl_s, asked.name, list(asked.tags), asked.model) == (60.0, "n", ["law"], "tiny")
    assert json.loads(asked.chat.tools) == [TOOL]
    assert [turn.content for turn in asked.chat.messages] == [SYSTEM["content"]]


async def test_caches_are_listed_page_by_page_changed_and_deleted() -> None:
    fake = knowing(*(context(f"cache-{n}", 100.0 + n, metadata={"n": str(n % 2)}) for n in (3, 2, 1)))
    fake.answers["UpdateContextRequest"] = pb.UpdateContextResponse(context=context("cache-3"))
    fake.answers["DeleteContextRequest"] = pb.DeleteContextResponse(id="cache-3")

    async def listed(gateway: Answers, query: str) -> list[str]:
        found = (await gateway.http.get(f"{CACHE}?{query}")).json()
        assert found["object"] == "list"
        return [cache["id"] for cache in found["data"]]

    async with answering(fake) as gateway:
        assert await listed(gateway, "") == ["cache-3", "cache-2", "cache-1"]
        assert await listed(gateway, "order=asc&limit=2") == ["cache-1", "cache-2"]
        assert await listed(gateway, "after=cache-3&before=cache-1") == ["cache-2"]
        for cursor in ("after", "before"):
            refused = await gateway.http.get(f"{CACHE}?{cursor}=cache-9")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, cursor)
        assert await listed(gateway, "metadata[n]=1") == ["cache-3", "cache-1"]
        for wrong in ("limit=0", "limit=x", "order=up"):
            assert (await gateway.http.get(f"{CACHE}?{wrong}")).json()["error"]["param"] == wrong.partition("=")[0]
        assert (await gateway.http.get(f"{CACHE}/cache-3")).json()["id"] == "cache-3"
        expired_at = int(time.time()) + 500
        changed = await gateway.http.put(f"{CACHE}/cache-3", json={"expired_at": expired_at, "metadata": {"a": "b"}})
        assert changed.json()["id"] == "cache-3"
        gone = await gateway.http.delete(f"{CACHE}/cache-3")
        assert gone.json() == {"deleted": True, "id": "cache-3", "object": "context_cache_object.deleted"}
        fake.answers["ListContextsRequest"] = NotFound("there is no context 'other'")
        missing = await gateway.http.get(f"{CACHE}/other")
    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "there is no context 'other'")
    (update,) = [asked for asked in fake.asked if isinstance(asked, pb.UpdateContextRequest)]
    assert 490 < update.ttl_s <= 500
    assert dict(update.metadata) == {"a": "b"}


async def test_tags_name_caches() -> None:
    fake = knowing(context(tags=["a", "b"]))
    fake.answers["UpdateContextRequest"] = pb.UpdateContextResponse(context=context(tags=["a"]))
    told = {"tag": "a", "cache_id": "cache-1", "object": "cache_object.tag", "owned_by": "", "created_at": 100}
    async with answering(fake) as gateway:
        made = await gateway.http.post(f"{CACHE}/refs/tags", json={"tag": "a", "cache_id": "cache-1"})
        assert made.json() == told
        assert (await gateway.http.get(f"{CACHE}/refs/tags/a")).json() == told
        tags = (await gateway.http.get(f"{CACHE}/refs/tags?limit=1")).json()["data"]
        assert tags == [told]
        assert (await gateway.http.get(f"{CACHE}/refs/tags/a/content")).json()["id"] == "cache-1"
        for path in ("cache-1", "cache-1/content"):  # an id is no tag
            refused = await gateway.http.get(f"{CACHE}/refs/tags/{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        refused = await gateway.http.get(f"{CACHE}/refs/tags?after=cache-1")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
        fake.answers["UpdateContextRequest"] = NotFound("there is no context 'a'")
        gone = await gateway.http.delete(f"{CACHE}/refs/tags/a")
        assert gone.json() == {"deleted": True, "object": "cache_object.tag.deleted", "tag": "a"}
        wrong = await gateway.http.post(f"{CACHE}/refs/tags", json={"tag": "7", "cache_id": "cache-1"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tag")


@pytest.mark.parametrize(("reference", "name"), [("cache_id=cache-1", "cache-1"), ("tag=law;dry_run=0", "law")])
async def test_a_chat_names_a_cache_in_its_first_message(reference: str, name: str) -> None:
    fake = knowing(context())
    messages = [{"role": "cache", "content": f"{reference};reset_ttl=30"}, ASK]
    async with answering(fake) as gateway:
        response = await gateway.chat(messages=messages)
    assert response.status_code == 200
    assert gateway.asked.context == pb.ContextUse(id="cache-1", reset_ttl_s=30.0)
    assert [turn.role for turn in gateway.asked.chat.messages] == ["user"]
    assert fake.asked == [pb.ListContextsRequest(id=name)]
    assert response.headers["msh-context-cache-id"] == "cache-1"
    assert response.headers["msh-context-cache-token-saved"] == "64"
    assert abs(int(response.headers["msh-context-cache-token-exp"]) - time.time() - 30) < 20
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_a_chat_names_a_cache_by_a_header_and_repeats_its_messages() -> None:
    fake = knowing(context(), cached_tokens=80)
    headers = {"X-Msh-Context-Cache": "cache-1", "X-Msh-Context-Cache-Reset-TTL": "60"}
    chat = "/v1/chat/completions"
    async with answering(fake) as gateway:
        used = await gateway.http.post(chat, json={"messages": [SYSTEM, ASK]}, headers=headers)
        other = await gateway.http.post(chat, json={"messages": [ASK, ASK]}, headers=headers)
    assert used.headers["msh-context-cache-token-saved"] == "70"  # not more than the cache has
    assert "msh-context-cache-id" not in other.headers  # the messages are others: it is served without the cache
    first, second = fake.requests
    assert first.context == pb.ContextUse(id="cache-1", reset_ttl_s=60.0)
    assert [turn.content for turn in first.chat.messages] == [ASK["content"]]
    assert not second.HasField("context")
    assert len(second.chat.messages) == 2


async def test_a_caches_tools_are_known_to_the_model_and_found_in_answers() -> None:
    fake = knowing(context(tools=True))
    async with answering(fake, tool_call_parser="hermes") as gateway:
        response = await gateway.chat(messages=[{"role": "cache", "content": "cache_id=cache-1"}, ASK])
        assert response.status_code == 200
        assert gateway.asked.chat.tools == ""  # the conductor adds the cache's
        assert gateway.asked.sampling.skip_special_tokens is False
        assert gateway.asked.context.id == "cache-1"
        again = await gateway.chat(messages=[{"role": "cache", "content": "cache_id=cache-1"}, ASK], tools=[TOOL])
    assert again.json()["error"]["param"] == "tools"


@pytest.mark.parametrize(
    "content",
    ["", "cache_id=", "cache_id=a;tag=b", "id=a", "cache_id=a;reset_ttl=soon", "cache_id=a;dry_run=1", None, ["x"]],
)
async def test_a_wrong_reference_is_refused_by_its_place(content: object) -> None:
    async with answering(knowing(context())) as gateway:
        response = await gateway.chat(messages=[{"role": "cache", "content": content}, ASK])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages.0.content")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-msh-context-cache": "a;b"}, "x-msh-context-cache"),
        ({"x-msh-context-cache": "a", "x-msh-context-cache-reset-ttl": "-1"}, "x-msh-context-cache-reset-ttl"),
        ({"x-msh-context-cache": "a", "x-msh-context-cache-dryrun": "1"}, "x-msh-context-cache-dryrun"),
    ],
)
async def test_a_wrong_header_is_refused_by_its_name(headers: dict[str, str], param: str) -> None:
    async with answering(knowing(context())) as gateway:
        response = await gateway.http.post("/v1/chat/completions", json={"messages": [ASK]}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [SYSTEM], "ttl": 5, "expired_at": 7}, "ttl"),
        ({"messages": [SYSTEM], "ttl": -5}, "ttl"),
        ({"messages": [SYSTEM], "expired_at": 7}, "expired_at"),
        ({"messages": [SYSTEM], "tags": ["-"]}, "tag"),
        ({"messages": [{"role": "cache", "content": "x"}]}, "messages.0.role"),
    ],
)
async def test_what_is_wrong_with_a_cache_is_named(body: dict[str, Any], param: str) -> None:
    async with answering(FakeConductor()) as gateway:
        response = await gateway.http.post(CACHE, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


class AnnsAlone(FakeConductor):
    """Knows one context, which is ann's."""

    def answer(self, request: Message) -> Message:
        match request:
            case pb.ListContextsRequest(id=name, tenant=tenant) | pb.UpdateContextRequest(id=name, tenant=tenant):
                known = (name, tenant) == ("cache-1", "ann")
            case pb.DeleteContextRequest(name=name, tenant=tenant):
                known = (name, tenant) == ("cache-1", "ann")
            case _:
                return super().answer(request)
        if not known:
            raise NotFound(f"there is no context {name!r}")
        return pb.ListContextsResponse(contexts=[context()])


async def test_another_tenants_cache_is_told_as_none_whatever_is_asked_of_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{hash_key('ann-key')} ann\nsha256:{hash_key('bob-key')} bob\n")
    async with answering(AnnsAlone(), api_keys=keys) as gateway:

        async def told(key: str, name: str) -> list[tuple[int, str]]:
            gateway.http.headers["authorization"] = f"Bearer {key}"
            chat = {"messages": [{"role": "cache", "content": f"cache_id={name}"}, ASK]}
            answers = [
                await gateway.http.get(f"{CACHE}/{name}"),
                await gateway.http.put(f"{CACHE}/{name}", json={"ttl": 5}),
                await gateway.http.delete(f"{CACHE}/{name}"),
                await gateway.http.post(f"{CACHE}/refs/tags", json={"tag": "mine", "cache_id": name}),
                await gateway.http.post("/v1/chat/completions", json=chat),
            ]
            return [(reply.status_code, reply.text.replace(name, "NAME")) for reply in answers]

        assert (await gateway.http.get(f"{CACHE}/cache-1")).status_code == 401
        strange = await told("bob-key", "cache-1")
        assert strange == await told("ann-key", "cache-9")
        assert [status for status, _ in strange] == [404] * 5
        assert "ann" not in str(strange)
        assert (await gateway.http.get(f"{CACHE}/cache-1")).status_code == 200
