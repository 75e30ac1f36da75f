"""Named contexts and deleted KV, over real services: what is kept outlives them, what is deleted does not come back."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.main import app
from moonpool.client import Client, Context, GenerateResult, Message, NotFound
from tests.integration.conftest import BLOCK, tokens
from tests.integration.stack import REST_TIMEOUT_S, TRIES, CheckedStack

TWO = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
SYSTEM: Message = {"role": "system", "content": "the tide of a moon pool rises at noon " * 6}
QUESTION: Message = {"role": "user", "content": "when?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(stack: CheckedStack) -> Iterator[Client]:
    with Client(stack.address) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + REST_TIMEOUT_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


def stored(client: Client) -> int:
    """Blocks that the conductor knows of in the kvstore."""
    return sum(instance.indexed_blocks for instance in client.cluster_state().instances if instance.kind == "kvstore")


def ask(client: Client, prompt: list[int], tenant: str) -> GenerateResult:
    return client.generate(token_ids=prompt, tenant=tenant, sampling=TWO)


def fill(client: Client, prompt: list[int], *tenants: str) -> list[str]:
    """Each tenant's prompt is in the kvstore. Returns where each was computed."""
    computed = []
    for tenant in tenants:
        before = stored(client)
        computed.append(ask(client, prompt, tenant).placement.prefill)
        until(lambda before=before: stored(client) >= before + len(prompt) // BLOCK)  # type: ignore[misc]
    return computed


def settled(client: Client, name: str, tenant: str) -> Context:
    """A context whose KV was computed."""
    until(lambda: client.contexts.get(name, tenant=tenant).status != "pending")
    return client.contexts.get(name, tenant=tenant)


def test_deleted_kv_is_in_no_tier_and_does_not_come_back_with_a_killed_store(
    stack: CheckedStack, client: Client
) -> None:
    prompt = tokens(6 * BLOCK, "deleted")
    computed = fill(client, prompt, "gone", "stays")
    again = ask(client, prompt, "gone")
    assert again.usage.cached_tokens == 6 * BLOCK - 1
    deleted = client.delete_kv(tenants=["gone"])
    assert deleted.complete
    assert deleted.recorded == 1
    blocks = {instance.instance: instance.blocks for instance in deleted.instances}
    assert blocks["kvstore-0"] == 6
    assert blocks["prefill-0"] == (6 if "prefill-0" in (computed[0], again.placement.prefill) else 0)
    assert blocks["decode-0"] >= 6
    stack.restart("kvstore-0", kill=True)
    until(lambda: stored(client) >= 6)
    assert ask(client, prompt, "gone").usage.cached_tokens == 0
    assert ask(client, prompt, "stays").usage.cached_tokens == 6 * BLOCK - 1
    assert client.delete_kv(tenants=["never"]).blocks == 0


def test_a_store_that_was_away_deletes_when_it_joins_again(stack: CheckedStack, client: Client) -> None:
    prompt = tokens(4 * BLOCK, "away")
    fill(client, prompt, "away")
    stack.services["kvstore-0"].signal(signal.SIGKILL)
    stack.services["kvstore-0"].wait(60)
    until(lambda: not stored(client))
    assert client.delete_kv(tenants=["away"]).recorded == 0
    stack.spawn_again("kvstore-0").wait_ready(180)
    stack.wait_joined(180)
    assert ask(client, prompt, "away").usage.cached_tokens == 0


def test_of_a_request_that_runs_meanwhile_nothing_is_kept(stack: CheckedStack, client: Client) -> None:
    """It goes on, and says what it would have said. Another tenant's KV stays."""
    longer = SamplingParams(max_tokens=12 * BLOCK, temperature=0.0, ignore_eos=True)
    for tried in range(TRIES):
        prompt = tokens(3 * BLOCK, f"meanwhile {tried}")
        expected = client.generate(token_ids=prompt, tenant="other", sampling=longer)
        stream, deleted = client.stream(token_ids=prompt, tenant="runs", sampling=longer), False
        for event in stream:
            if not deleted and event.position >= 2 * BLOCK:  # tokens may come several at a time
                deleted = client.delete_kv(tenants=["runs"]).complete
                assert deleted
        assert deleted
        assert stream.result is not None
        assert stream.result.token_ids == expected.token_ids
        turn = prompt + stream.result.token_ids
        assert ask(client, turn, "runs").usage.cached_tokens == 0
        stays = ask(client, turn, "other").usage.cached_tokens
        if stays > 12 * BLOCK:
            break
        stack.restart("prefill-0")  # it has learnt that loads are slow
    assert stays > 12 * BLOCK


def test_a_context_is_used_by_id_and_tag_and_says_what_it_saved(client: Client) -> None:
    made = client.contexts.create(messages=[SYSTEM], name="tides", ttl_s=600.0, tenant="ours", tags=["tide"])
    assert (made.status, made.name, made.tags, made.messages) == ("pending", "tides", ("tide",), (SYSTEM,))
    context = settled(client, made.id, "ours")
    assert (context.status, context.error, context.kvstore) == ("ready", "", "kvstore-0")
    assert context.pinned_blocks == context.blocks == context.tokens // BLOCK > 2
    plain = client.generate(messages=[SYSTEM, QUESTION], tenant="plain", sampling=TWO)
    for name in (context.id, "tide"):
        used = client.generate(messages=[QUESTION], context=name, tenant="ours", sampling=TWO)
        assert used.token_ids == plain.token_ids
        assert used.usage.prompt_tokens == plain.usage.prompt_tokens
        assert used.usage.cached_tokens >= context.blocks * BLOCK
    until(lambda: client.contexts.get("tide", tenant="ours").hits == 2)
    found = client.contexts.get("tide", tenant="ours")
    assert 2 * context.blocks * BLOCK <= found.saved_tokens <= 2 * context.tokens
    assert client.contexts.list(tenant="ours") == (found,)


def test_another_tenants_context_is_not_found_as_if_there_were_none(client: Client) -> None:
    context = client.contexts.create(messages=[SYSTEM], tenant="mine", tags=["mine"])
    settled(client, context.id, "mine")
    for name in (context.id, "mine"):
        calls: list[Callable[[], object]] = [
            lambda name=name: client.generate(messages=[QUESTION], context=name, tenant="thief"),  # type: ignore[misc]
            lambda name=name: client.contexts.get(name, tenant="thief"),  # type: ignore[misc]
            lambda name=name: client.contexts.update(name, ttl_s=5.0, tenant="thief"),  # type: ignore[misc]
            lambda name=name: client.contexts.delete(name, tenant="thief"),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(NotFound) as refused:
                call()
            assert str(refused.value) == f"there is no context {name!r}"
    with pytest.raises(NotFound, match="there is no context 'cache-none'"):
        client.contexts.get("cache-none", tenant="thief")
    assert client.contexts.list(tenant="thief") == ()


def test_a_context_outlives_store_and_conductor_and_what_was_evicted_is_recomputed(
    stack: CheckedStack, client: Client
) -> None:
    prompt = tokens(5 * BLOCK + 3, "durable")
    context = settled(client, client.contexts.create(token_ids=prompt, tenant="ours", tags=["durable"]).id, "ours")
    assert context.pinned_blocks == 5
    assert client.delete_kv(keys=context.keys).blocks >= 10  # as if all of it had been evicted, everywhere
    stack.restart("kvstore-0", kill=True)
    stack.restart("conductor", kill=True)
    again = client.contexts.get("durable", tenant="ours")
    assert (again.id, again.token_ids, again.blocks) == (context.id, tuple(prompt), 5)
    suffix = tokens(BLOCK, "suffix")
    first = client.generate(token_ids=suffix, context="durable", tenant="ours", sampling=TWO)
    assert (first.usage.cached_tokens, first.usage.prompt_tokens) == (0, len(prompt) + len(suffix))
    assert first.token_ids == ask(client, prompt + suffix, "ours").token_ids
    second = client.generate(token_ids=suffix, context="durable", context_ttl_s=900.0, tenant="ours", sampling=TWO)
    assert second.usage.cached_tokens >= 5 * BLOCK
    assert client.contexts.get("durable", tenant="ours").expires_at > again.expires_at - 3600 + 800


def test_a_deleted_context_is_gone_with_its_kv(client: Client) -> None:
    prompt = tokens(4 * BLOCK, "deleted context")
    context = settled(client, client.contexts.create(token_ids=prompt, tenant="ours", tags=["short"]).id, "ours")
    name, deleted = client.contexts.delete("short", tenant="ours")
    assert name == context.id
    assert {instance.instance: instance.blocks for instance in deleted.instances}["kvstore-0"] == 4
    for gone in (context.id, "short"):
        with pytest.raises(NotFound):
            client.contexts.get(gone, tenant="ours")
    assert ask(client, prompt, "ours").usage.cached_tokens == 0


@pytest.fixture(scope="module")
def gateway(address: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://{address}", timeout=60) as client:
        yield client


def test_caching_over_http_as_kimis_users_know_it(gateway: httpx2.Client, client: Client) -> None:
    made = gateway.post("/v1/caching", json={"messages": [SYSTEM], "name": "tides", "ttl": 600}).json()
    assert (made["object"], made["status"], made["messages"]) == ("context_cache_object", "pending", [SYSTEM])
    name = made["id"]
    settled(client, name, "")
    gateway.post("/v1/caching/refs/tags", json={"tag": "tides", "cache_id": name}).raise_for_status()
    ready = gateway.get("/v1/caching/refs/tags/tides/content").json()
    assert (ready["id"], ready["status"]) == (name, "ready")
    chat = {"max_tokens": 2, "temperature": 0}
    plain = gateway.post("/v1/chat/completions", json={**chat, "messages": [SYSTEM, QUESTION]}).json()
    reference = {"role": "cache", "content": "tag=tides;reset_ttl=900"}
    used = gateway.post("/v1/chat/completions", json={**chat, "messages": [reference, QUESTION]})
    assert used.json()["choices"][0]["message"] == plain["choices"][0]["message"]
    saved = int(used.headers["msh-context-cache-token-saved"])
    assert made["tokens"] // BLOCK * BLOCK <= saved <= made["tokens"]
    assert used.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= saved
    until(lambda: gateway.get(f"/v1/caching/{name}").json()["moonpool"]["hits"] == 1)
    assert gateway.delete(f"/v1/caching/{name}").json()["deleted"]
    assert gateway.get(f"/v1/caching/{name}").status_code == 404


def test_the_command_line_makes_uses_lists_renews_and_deletes(stack: CheckedStack, tmp_path: Path) -> None:
    def run(*arguments: str, status: int = 0) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--address", stack.address, "--json"])
        assert done.exit_code == status, done.output
        return json.loads(done.stdout)

    file = tmp_path / "turns.json"
    file.write_text(json.dumps([SYSTEM]))
    functions = tmp_path / "tools.json"
    functions.write_text(json.dumps([TOOL]))
    create = ("context", "create", str(file), "--messages", "--name", "n", "--tag", "cli", "--tenant", "cli")
    made = run(*create, "--tools", str(functions))
    assert (made["name"], made["tags"], made["messages"]) == ("n", ["cli"], [SYSTEM])
    assert json.loads(made["tools"]) == [TOOL]
    assert [each["id"] for each in run("context", "list", "--tenant", "cli")] == [made["id"]]
    renewed = run("context", "renew", "cli", "--ttl-s", "90000", "--tenant", "cli")
    assert renewed["expires_at"] > made["expires_at"] + 80000
    with Client(stack.address) as client:
        ready = settled(client, "cli", "cli")
    asked = (str(QUESTION["content"]), "--chat", "--max-tokens", "2", "--tenant", "cli")
    used = run("generate", *asked, "--context", "cli", "--context-ttl-s", "180000")
    assert used["usage"]["cached_tokens"] >= ready.blocks * BLOCK
    assert run("context", "show", "cli", "--tenant", "cli")["expires_at"] > renewed["expires_at"] + 80000
    gone = run("context", "delete", "cli", "--tenant", "cli")
    assert (gone["context"], gone["complete"], gone["blocks"] > 0) == (made["id"], True, True)
    deleted = run("delete", "--tenant", "cli", "--key", "00" * 32)
    assert (deleted["complete"], deleted["recorded"]) == (True, 1)
