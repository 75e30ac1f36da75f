"""Contexts and deleted KV in the SDK, both clients, against a conductor in memory."""

import pytest

from moonpool.client import Context, DeletedKV, InstanceDeletion, InvalidRequest, NotFound
from moonpool.client.testing import FakeConductor
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .conftest import Dial

KEY = bytes(range(32))
TOLD = pb.Context(
    id="cache-1",
    made=pb.CreateContextRequest(
        name="law",
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="system", content="The law.")]),
        tenant="ours",
        tags=["latest"],
        metadata={"case": "7"},
    ),
    status=pb.CONTEXT_STATUS_READY,
    created_at=100.0,
    expires_at=200.0,
    tokens=70,
    blocks=4,
    pinned_blocks=3,
    pinned_bytes=300,
    kvstore="kvstore-0",
    hits=2,
    saved_tokens=128,
    error="not all of it is pinned: tenant_budget",
    model="tiny",
    keys=KEY,
)
FOUND = Context(
    id="cache-1",
    name="law",
    status="ready",
    tenant="ours",
    model="tiny",
    created_at=100.0,
    expires_at=200.0,
    tokens=70,
    blocks=4,
    pinned_blocks=3,
    pinned_bytes=300,
    kvstore="kvstore-0",
    hits=2,
    saved_tokens=128,
    tags=("latest",),
    messages=({"role": "system", "content": "The law."},),
    token_ids=(),
    description="",
    metadata={"case": "7"},
    error="not all of it is pinned: tenant_budget",
    keys=(KEY,),
)


def test_a_context_is_made_of_messages_or_tokens(dial: Dial) -> None:
    fake = FakeConductor()
    fake.answers["CreateContextRequest"] = pb.CreateContextResponse(context=TOLD)
    with dial(fake) as client:
        turns = [{"role": "system", "content": "The law."}]
        made = client.contexts.create(messages=turns, name="law", ttl_s=60.0, tenant="ours", tags=["latest"])
        client.contexts.create(token_ids=[1, 2], metadata={"case": "7"}, description="d", model="tiny")
        for wrong, field in (
            ({}, "prompt"),
            ({"token_ids": [1], "name": 3}, "name"),
            ({"token_ids": ["x"]}, "token_ids"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                client.contexts.create(**wrong)
            assert refused.value.field == field
    assert made == FOUND
    assert fake.asked == [
        pb.CreateContextRequest(name="law", chat=TOLD.made.chat, ttl_s=60.0, tenant="ours", tags=["latest"]),
        pb.CreateContextRequest(
            prompt=pb.TokenPrompt(token_ids=[1, 2]), metadata={"case": "7"}, description="d", model="tiny"
        ),
    ]


def test_contexts_are_listed_found_changed_and_ended(dial: Dial) -> None:
    fake = FakeConductor()
    did = pb.InstanceDeletion(instance="kvstore-0", blocks=4, bytes=400)
    late = pb.InstanceDeletion(instance="decode-0", error="it does not answer")
    deleted = pb.DeleteKVResponse(id="d", instances=[did, late], recorded=1)
    fake.answers |= {
        "ListContextsRequest": pb.ListContextsResponse(contexts=[TOLD]),
        "UpdateContextRequest": pb.UpdateContextResponse(context=TOLD),
        "DeleteContextRequest": pb.DeleteContextResponse(id="cache-1", deleted=deleted),
        "DeleteKVRequest": deleted,
    }
    with dial(fake) as client:
        assert client.contexts.list(tenant="ours") == (FOUND,)
        assert client.contexts.get("latest", tenant="ours") == FOUND
        assert client.contexts.update("latest", ttl_s=5.0, add_tags=["a"], remove_tags=["b"]) == FOUND
        name, kv = client.contexts.delete("cache-1", tenant="ours")
        assert client.delete_kv(keys=[KEY], tenants=["ours"], namespaces=[KEY]) == kv
        with pytest.raises(InvalidRequest, match="context"):
            client.contexts.get("")
        fake.answers["ListContextsRequest"] = NotFound("there is no context 'other'")
        with pytest.raises(NotFound):
            client.contexts.get("other")
    assert name == "cache-1"
    assert kv == DeletedKV(
        "d", (InstanceDeletion("kvstore-0", 4, 400), InstanceDeletion("decode-0", 0, 0, "it does not answer")), 1
    )
    assert (kv.blocks, kv.bytes, kv.complete) == (4, 400, False)
    selection = kv_pb2.Selection(keys=KEY, tenants=["ours"], namespaces=[KEY])
    [asked] = [request for request in fake.asked if isinstance(request, pb.DeleteKVRequest)]
    assert (asked.selection, len(asked.id)) == (selection, 32)


def test_a_request_names_its_context(dial: Dial) -> None:
    fake = FakeConductor()
    with dial(fake) as client:
        client.generate(token_ids=[1], context="latest", context_ttl_s=60.0)
        client.generate(token_ids=[1])
    assert fake.requests[0].context == pb.ContextUse(id="latest", reset_ttl_s=60.0)
    assert not fake.requests[1].HasField("context")
