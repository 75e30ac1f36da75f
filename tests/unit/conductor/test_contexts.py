"""Named contexts of a conductor: made, used, counted, renewed, deleted; their records live in the kvstores."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from moonpool.base.kv.keys import block_keys, chain_root, tokens_from_bytes, unpack_keys
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Context, InvalidRequest, MoonpoolError, NotFound, Unavailable
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import BLOCK_SIZE, WAIT_S, ScriptedPrefill, decode, prefill
from .stack import Stack, stack
from .stores import FakeStore

PROMPT = list(range(30, 30 + 3 * BLOCK_SIZE + 5))
TWO = SamplingParams(max_tokens=2, temperature=0.0)
SYSTEM = {"role": "system", "content": "the tide of a moon pool " * 8}


def keys_of(tokens: list[int], tenant: str = "ours") -> list[bytes]:
    return list(block_keys(chain_root(b"n" * 32, tenant), tokens, BLOCK_SIZE))


def write_back(p: ScriptedPrefill, store: FakeStore) -> None:
    """Every prompt that prefill computes is in the store at once."""
    compute = p.Prefill

    async def computing(request: Any, context: Any) -> Any:
        async for response in compute(request, context):
            yield response
        new = [key for key in unpack_keys(request.sequence.block_keys) if key not in store.keys]
        if request.HasField("write_back") and new:
            store.store(list(new))

    p.Prefill = computing  # type: ignore[method-assign]


async def settled(s: Stack, name: str, tenant: str = "ours") -> Context:
    """The context, when nothing is being done for it any more."""
    async with asyncio.timeout(WAIT_S):
        while (await s.look())["context_tasks"]:
            pass
    return await s.client.contexts.get(name, tenant=tenant)


async def test_a_context_of_tokens_is_computed_pinned_and_goes_before_prompts() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, name="n", tenant="ours", tags=["t"], ttl_s=60.0)
        assert (made.status, made.tokens, made.blocks, made.pinned_blocks) == ("pending", len(PROMPT), 3, 0)
        assert made.keys == tuple(keys_of(PROMPT))
        ready = await settled(s, "t")
        assert (ready.status, ready.pinned_blocks, ready.pinned_bytes, ready.kvstore) == ("ready", 3, 300, "kvstore-0")
        (pin,) = store.pins.values()
        assert (pin.tenant, pin.ttl_s <= 60.0, unpack_keys(pin.keys)) == ("ours", True, keys_of(PROMPT))
        warmed = p.requests[-1]
        assert tokens_from_bytes(warmed.sequence.token_ids).tolist() == PROMPT
        assert not warmed.HasField("target")
        p.cached_tokens = 2 * BLOCK_SIZE
        for name in ("t", made.id):
            used = await s.client.generate(token_ids=[7, 8], context=name, tenant="ours", sampling=TWO)
            assert used.usage.prompt_tokens == len(PROMPT) + 2
        assert tokens_from_bytes(p.requests[-1].sequence.token_ids).tolist() == [*PROMPT, 7, 8]
        with pytest.raises(InvalidRequest) as salted:
            await s.client.generate(token_ids=[7], context=made.id, tenant="ours", cache_salt="s", sampling=TWO)
        assert salted.value.field == "cache_salt"
        counted = await settled(s, "t")
        assert (counted.hits, counted.saved_tokens) == (2, 4 * BLOCK_SIZE)


async def test_a_conversations_beginning_is_what_all_that_go_on_have_in_common() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(messages=[SYSTEM], tenant="ours")  # type: ignore[list-item]
        warmed = tokens_from_bytes((await settled(s, made.id), p.requests[-1])[1].sequence.token_ids).tolist()
        assert len(warmed) == made.tokens
        for role, text in (("user", "hello"), ("user", "why?")):
            turn: Any = {"role": role, "content": text}
            await s.client.generate(messages=[turn], context=made.id, tenant="ours", sampling=TWO)
            prompt = tokens_from_bytes(p.requests[-1].sequence.token_ids).tolist()
            assert prompt[: len(warmed)] == warmed
            await s.client.generate(messages=[SYSTEM, turn], tenant="ours", sampling=TWO)  # type: ignore[list-item]
            assert tokens_from_bytes(p.requests[-1].sequence.token_ids).tolist() == prompt


async def test_what_was_not_stored_or_computed_may_be_used_all_the_same() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    p.before.append(Unavailable("broken"))
    async with stack(store, p, d, retries=0) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours")
        failed = await settled(s, made.id)
        assert failed.status == "error"
        assert failed.error
        store.store(keys_of(PROMPT)[:2])
        used = await s.client.generate(token_ids=[7], context=made.id, tenant="ours", sampling=TWO)
        assert len(used.token_ids) == 2
        partly = await settled(s, made.id)
        assert (partly.pinned_blocks, partly.hits) == (2, 1)


async def test_contexts_outlive_conductors_and_are_the_same_at_all_of_them() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours", tags=["t"])
        await s.client.generate(token_ids=[7], context="t", tenant="ours", sampling=TWO)
        before = await settled(s, "t")
    store.agent = None
    async with stack(store, prefill(), decode(), id="conductor-1") as s:
        assert await s.client.contexts.list(tenant="ours") == (before,)
        await s.client.generate(token_ids=[7], context="t", tenant="ours", sampling=TWO)
        assert (await settled(s, "t")).hits == 2  # each conductor counts for itself, and all counts are added up
        await s.client.contexts.delete(made.id, tenant="ours")
    async with stack(store) as s:
        assert await s.client.contexts.list(tenant="ours") == ()


async def test_a_context_whose_time_is_over_is_inactive_until_it_is_renewed() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours", tags=["t"], ttl_s=1e-6)
        assert (await settled(s, "t")).status == "inactive"
        assert store.pins == {}
        with pytest.raises(NotFound, match="is over"):
            await s.client.generate(token_ids=[7], context="t", tenant="ours", sampling=TWO)
        await s.client.generate(token_ids=[7], context="t", context_ttl_s=60.0, tenant="ours", sampling=TWO)
        again = await settled(s, "t")
        assert (again.status, again.pinned_blocks) == ("ready", 3)
        assert again.expires_at > made.expires_at + 50
        renewed = await s.client.contexts.update(
            "t", ttl_s=500.0, metadata={"a": "b"}, add_tags=["u"], remove_tags=["t"], tenant="ours"
        )
        assert (renewed.tags, renewed.metadata) == (("u",), {"a": "b"})
        assert renewed.expires_at > again.expires_at + 400
        with pytest.raises(NotFound):
            await s.client.contexts.get("t", tenant="ours")


async def test_a_pin_without_a_name_pins_and_does_nothing_more() -> None:
    """Its text is not kept, it ends with its time for good, and its end can come earlier."""
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours", ttl_s=60.0, pin_only=True)
        pinned = await settled(s, made.id)
        assert (pinned.status, pinned.pinned_blocks, pinned.token_ids) == ("ready", 3, ())
        assert await s.client.contexts.list(tenant="ours") == ()
        with pytest.raises(NotFound, match="only pins KV"):
            await s.client.generate(token_ids=[7], context=made.id, tenant="ours", sampling=TWO)
        await s.client.contexts.update(made.id, ttl_s=1.0, tenant="ours")
        await settled(s, made.id)
        (pin,) = store.pins.values()
        assert pin.ttl_s <= 1.0
        (record,) = store.replicated.of("context")
        assert record.expires_at == pytest.approx(pinned.expires_at - 59.0, abs=30.0)


async def test_a_pin_is_of_the_kv_with_its_salt() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        pinned = [
            await s.client.contexts.create(token_ids=PROMPT, pin_only=True, cache_salt=salt) for salt in ("", "secret")
        ]
        plain, salted = [await settled(s, each.id, "") for each in pinned]
        assert (plain.pinned_blocks, salted.pinned_blocks) == (3, 3)
        assert not set(plain.keys) & set(salted.keys)
        assert not [record for record in store.replicated.of("context") if b"secret" in record.value]
        with pytest.raises(InvalidRequest) as caught:
            await s.client.contexts.create(token_ids=PROMPT, cache_salt="secret")
        assert caught.value.field == "cache_salt"


async def test_a_tag_moves_to_the_context_that_has_it_last() -> None:
    async with stack(FakeStore(), prefill(), decode()) as s:
        first = await s.client.contexts.create(token_ids=[1, 2], tenant="ours", tags=["t"])
        second = await s.client.contexts.create(token_ids=[3, 4], tenant="ours", tags=["t"])
        assert (first.status, second.status) == ("ready", "ready")  # nothing to compute: not a block
        assert (await s.client.contexts.get("t", tenant="ours")).id == second.id
        assert (await s.client.contexts.get(first.id, tenant="ours")).tags == ()


async def test_a_deleted_context_is_gone_with_its_pin_and_its_kv() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours", tags=["t"])
        await settled(s, "t")
        name, deleted = await s.client.contexts.delete("t", tenant="ours")
        assert name == made.id
        assert {instance.instance: instance.blocks for instance in deleted.instances}["kvstore-0"] == 3
        assert (store.keys, store.pins) == ([], {})
        assert list(store.replicated.of("context")) == []
        for calling in _calls(s, made.id, "ours"):
            with pytest.raises(NotFound, match=f"there is no context '{made.id}'"):
                await calling()


async def test_a_context_whose_deletion_is_asked_for_again_is_no_unknown_one() -> None:
    """As by a client whose conductor ended before it answered; the KV goes, whoever began."""
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours", tags=["t"])
        await settled(s, "t")
        request = pb.DeleteContextRequest(name="t", tenant="ours", id="e" * 32)
        first, again = [await s.servicer.DeleteContext(request, None) for _ in range(2)]
        assert (first.id, again.id) == (made.id, "t")
        assert first.deleted.id == again.deleted.id == request.id
        assert [sum(instance.blocks for instance in answer.deleted.instances) for answer in (first, again)] == [3, 0]
        assert store.keys == []
        with pytest.raises(NotFound):
            await s.client.contexts.delete("t", tenant="ours")
        with pytest.raises(InvalidRequest, match="16 to 64"):
            await s.servicer.DeleteContext(pb.DeleteContextRequest(name="t", tenant="ours", id="short"), None)


async def test_before_a_kvstore_has_told_no_context_is_called_unknown() -> None:
    """A conductor that has just begun: the client may try again, or ask another conductor."""
    async with stack(prefill(), decode()) as s:
        for calling in _calls(s, "cache-1", "ours"):
            with pytest.raises(Unavailable, match="none has told this conductor of them yet"):
                await calling()
        with pytest.raises(Unavailable, match="none has told"):
            await s.client.contexts.list(tenant="ours")


async def test_while_no_kvstore_answers_no_context_is_called_unknown() -> None:
    """Another conductor may have made it a moment ago."""

    class Away(asyncio.Event):
        async def wait(self) -> Literal[True]:
            raise Unavailable("it is away")

    store = FakeStore()
    async with stack(store, prefill(), decode()) as s:
        there, store.answers = store.answers, Away()
        for calling in _calls(s, "cache-1", "ours"):
            with pytest.raises(Unavailable, match="none answers"):
                await calling()
        store.answers = there
        for calling in _calls(s, "cache-1", "ours"):
            with pytest.raises(NotFound):
                await calling()


async def test_another_tenants_context_is_as_none() -> None:
    async with stack(FakeStore(), prefill(), decode()) as s:
        made = await s.client.contexts.create(token_ids=[1, 2], tenant="ours", tags=["t"])
        for name in (made.id, "t"):
            for calling in _calls(s, name, "theirs"):
                with pytest.raises(NotFound) as refused:
                    await calling()
                assert str(refused.value) == f"there is no context {name!r}"
        assert await s.client.contexts.list(tenant="theirs") == ()


def _calls(s: Stack, name: str, tenant: str) -> list[Callable[[], Any]]:
    return [
        lambda: s.client.generate(token_ids=[1], context=name, tenant=tenant, sampling=TWO),
        lambda: s.client.contexts.get(name, tenant=tenant),
        lambda: s.client.contexts.update(name, ttl_s=5.0, tenant=tenant),
        lambda: s.client.contexts.delete(name, tenant=tenant),
    ]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"token_ids": [1], "ttl_s": -1.0}, "ttl_s"),
        ({"token_ids": [1], "ttl_s": 1e9}, "ttl_s"),
        ({"token_ids": [1], "name": "x" * 257}, "name"),
        ({"token_ids": [1], "tags": ["cache-1"]}, "tags"),
        ({"token_ids": [1], "metadata": {"k": "v" * 513}}, "metadata"),
        ({"token_ids": [1], "model": "other"}, "model"),
        ({"token_ids": [10_000]}, "token_ids"),
        ({"token_ids": [1] * 600}, "token_ids"),
    ],
)
async def test_what_is_wrong_with_a_context_is_named(given: dict[str, Any], field: str) -> None:
    async with stack(FakeStore(), prefill(), decode()) as s:
        with pytest.raises(InvalidRequest) as refused:
            await s.client.contexts.create(**given)
        assert refused.value.field == field
        assert await s.client.contexts.list() == ()


async def test_a_context_and_a_prompt_of_different_kinds_do_not_go_together() -> None:
    async with stack(FakeStore(), prefill(), decode()) as s:
        await s.client.contexts.create(token_ids=[1, 2], tags=["t"])
        with pytest.raises(InvalidRequest, match="of token_ids"):
            await s.client.generate(messages=[{"role": "user", "content": "hi"}], context="t")


async def test_a_context_whose_kvstore_leaves_before_it_is_stored_is_not_pending_for_ever() -> None:
    p, d, store, held = prefill(), decode(), FakeStore(), asyncio.Event()
    p.before.append(held)
    async with stack(p, d) as s:
        hello = await s.serve(store)
        call = await s.call_join(hello)
        await s.joined(store)
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours")
        assert made.status == "pending"
        await p.until(lambda: bool(p.requests))
        call.cancel()
        await s.until(lambda: s.cluster.find(store.id) is None)
        held.set()
        left = await settled(s, made.id)
        assert (left.status, left.pinned_blocks) == ("ready", 0)
        assert left.error == "not pinned: no kvstore is there"


async def test_a_late_pin_writes_neither_an_old_status_nor_an_old_time_to_live() -> None:
    """What other conductors have written meanwhile stays, and the pin follows it."""
    p, d, store = prefill(), decode(), FakeStore()
    write_back(p, store)
    async with stack(store, p, d) as s:
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours", ttl_s=60.0)
        pinning = asyncio.Event()
        store.before_pin.append(pinning)
        await store.until(lambda: store.pin_calls == 1)
        record = kv_pb2.Record()
        record.CopyFrom(next(store.replicated.of("context", "ours")))
        renewed = pb.Context.FromString(record.value)
        renewed.expires_at += 5000.0
        value = renewed.SerializeToString()
        store.replicated.merge(
            [
                kv_pb2.Record(
                    kind="context", tenant="ours", id=made.id, version=record.version + 1, value=value, expires_at=1e12
                )
            ]
        )
        pinning.set()
        ready = await settled(s, made.id)
        assert (ready.status, ready.pinned_blocks, ready.expires_at) == ("ready", 3, renewed.expires_at)
        (pin,) = store.pins.values()
        assert pin.ttl_s > 4000.0
        assert store.pin_calls == 2


async def test_uses_of_a_context_that_is_not_wholly_pinned_pin_it_one_after_the_other() -> None:
    p, d, store = prefill(), decode(), FakeStore()
    async with stack(store, p, d, retries=0) as s:
        p.before.append(Unavailable("broken"))
        made = await s.client.contexts.create(token_ids=PROMPT, tenant="ours")
        await settled(s, made.id)
        before, slow = store.pin_calls, asyncio.Event()
        store.before_pin.append(slow)
        for _ in range(20):
            await s.client.generate(token_ids=[7], context=made.id, tenant="ours", sampling=TWO)
        await store.until(lambda: store.pin_calls == before + 1)
        assert (await s.gauges())["context_tasks"] <= 2  # that pin, and counting hits
        slow.set()
        await settled(s, made.id)
        assert store.pin_calls == before + 1


async def test_without_a_kvstore_there_are_no_contexts() -> None:
    async with stack(prefill(), decode()) as s:
        with pytest.raises(MoonpoolError, match="none has joined"):
            await s.client.contexts.create(token_ids=[1])
