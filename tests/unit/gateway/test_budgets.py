"""Budgets of requests and tokens per minute: exact levels by a clock of the test's, and what a client is told."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest

from moonpool.base.rpc.api_keys import BudgetOwner, KeyLimits, hash_key
from moonpool.base.scheduling.budgets import TokenBucket
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.serving.budgets import Budgets
from moonpool.gateway.serving.errors import BudgetSpentError
from tests.unit.gateway.test_auth import write
from tests.unit.gateway.test_client_disconnect import Connection, Holding

from .fakes import CHAT, TURNS, answering, make_gateway, scope, settings, tokenizer


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def owner(name: str = "ann", *, requests: int | None = None, tokens: int | None = None) -> BudgetOwner:
    return BudgetOwner(name, f"{name}'s key", KeyLimits(requests, tokens))


def refused(budgets: Budgets, *owners: BudgetOwner) -> tuple[str, float]:
    """What is used up, and seconds until there is some."""
    with pytest.raises(BudgetSpentError) as caught:
        budgets.admit(owners)
    return caught.value.what, caught.value.retry_after_s


def test_bucket() -> None:
    """It is full at first, holds a minute's worth, and can be overdrawn."""
    bucket = TokenBucket(30, 0.0)
    for _ in range(30):
        assert bucket.wait_s(0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait_s(0.0) == 2.0
    assert bucket.wait_s(1.5) == 0.5
    assert bucket.wait_s(2.0) == 0
    bucket.take(61, 2.0)
    assert bucket.wait_s(2.0) == 122.0
    assert bucket.wait_s(1000.0) == 0
    bucket.take(30, 1000.0)
    assert bucket.wait_s(1000.0) == 2.0


def test_another_rate_forgets_nothing() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.change(100, 0.0)
    bucket.take(50, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(0.6)
    bucket.change(10, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(91 * 6)


def test_requests() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    ann = owner(requests=2)
    budgets.admit([ann])
    budgets.admit([ann])
    assert refused(budgets, ann) == ("requests", 30.0)
    budgets.admit([owner("bob", requests=1)])
    clock.now += 30
    budgets.admit([ann])
    assert refused(budgets, ann)[0] == "requests"


def test_tokens_are_counted_as_they_come() -> None:
    """Of the prompts once, as they are placed; what runs may overdraw, what is new waits."""
    clock = Clock()
    budgets = Budgets(clock)
    ann = owner(tokens=60)
    first, second = budgets.admit([ann]), budgets.admit([ann])
    first.charge(40, 1)
    first.charge(40, 1)
    second.charge(10, 1)
    second.charge(30, 1)  # another prompt of it was placed
    what, wait_s = refused(budgets, ann)
    assert (what, round(wait_s, 6)) == ("tokens", 15.0)
    clock.now += 15
    budgets.admit([ann])


def test_a_refusal_uses_nothing() -> None:
    """Of two budgets, that of the key is not used while that of the tenant is used up."""
    budgets = Budgets(Clock())
    key, tenant = owner("key", requests=2), owner("tenant", requests=1)
    budgets.admit([key, tenant])
    for _ in range(5):
        assert refused(budgets, key, tenant) == ("requests", 60.0)
    budgets.admit([key])


def line(key: str, limits: str, tenant: str) -> str:
    """A line of the file of keys."""
    return f"sha256:{hash_key(key)} {limits} {tenant}\n"


async def test_clients_are_told(tmp_path: Path) -> None:
    """OpenAI's error and Anthropic's, when to come again, and which budget it is; models and health are free."""
    path = write(tmp_path / "keys", line("ann-key", "rpm=1", "ann"), 1)
    async with answering(FakeConductor(), api_keys=path) as gateway:
        ours = openai.AsyncOpenAI(
            base_url="http://gateway/v1", api_key="ann-key", http_client=gateway.http, max_retries=0
        )
        await ours.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.RateLimitError, match="this key may use 1 requests per minute") as caught:
            await ours.completions.create(model="tiny", prompt="x")
        assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert 1 <= int(caught.value.response.headers["retry-after-ms"]) <= 60_000
        assert [model.id async for model in ours.models.list()] == ["tiny"]
        theirs = anthropic.AsyncAnthropic(
            base_url="http://gateway", api_key="ann-key", http_client=gateway.http, max_retries=0
        )
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
            await theirs.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
        write(path, line("ann-key", "rpm=3", "ann"), 2)
        await ours.completions.create(model="tiny", prompt="x")
        assert len(gateway.fake.requests) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_of_answers(stream: bool, tmp_path: Path) -> None:
    """Prompt and answer count, for all keys of the tenant; a refusal by the conductor costs no tokens."""
    lines = line("a", "", "ann") + line("b", "", "ann") + line("c", "", "bob") + "tenant tpm=100 ann\n"
    path = write(tmp_path / "keys", lines, 1)
    fake = FakeConductor(lambda _: answer([1, 2, 3], prompt_tokens=9700))
    async with answering(fake, api_keys=path) as gateway:
        for key, status in (("a", 200), ("b", 429), ("c", 200)):
            gateway.http.headers["authorization"] = f"Bearer {key}"
            answered = await gateway.chat(stream=stream)
            assert answered.status_code == status
            if status == 429:
                assert answered.json()["error"]["type"] == "tokens"


@pytest.mark.parametrize("events", [1, 3])
async def test_a_client_that_leaves_has_used_its_tokens(events: int, tmp_path: Path) -> None:
    """What came until then counts; the prompt too, whether there was a first token or not."""
    path = write(tmp_path / "keys", line("a", "tpm=60", "ann"), 1)
    holding = Holding(answer([1, 2, 3], prompt_tokens=6000)[:events])
    asked = scope(CHAT, authorization="Bearer a")
    with ThreadPoolExecutor(1) as threads:
        app = make_gateway(AsyncClient(transport=holding), settings(api_keys=path), threads, tokenizer())
        client, late = Connection({"messages": TURNS, "stream": True}), Connection({"messages": TURNS})
        serving = asyncio.create_task(app(asked, client.receive, client.send))
        await holding.call.held.wait()
        client.left.set()
        await serving
        await app(asked, late.receive, late.send)
    assert late.sent[0]["status"] == 429


def test_what_a_request_costs_beside_its_tokens() -> None:
    """Further answers are requests; a format and the prompt's log probabilities are tokens."""
    clock = Clock()
    budgets = Budgets(clock)
    ann = owner(requests=60, tokens=6000)
    charge = budgets.admit([ann])
    charge.charge_answers(64)
    assert refused(budgets, ann) == ("requests", 5.0)
    clock.now += 60
    charge = budgets.admit([ann])
    charge.prompt_weight = 10
    charge.charge(500, 1)
    charge.charge(500, 1)
    charge.charge_work(1008)
    what, wait_s = refused(budgets, ann)
    assert what == "tokens"
    assert wait_s == pytest.approx(11 / 100)


async def test_answers_formats_and_detokenising_are_charged(tmp_path: Path) -> None:
    """One request with several answers, and tokens that are only spelt, use up what they cost."""
    (tmp_path / "keys").write_text(f"sha256:{hash_key('ann-key')} rpm=4 ann\n")
    async with answering(FakeConductor(), api_keys=tmp_path / "keys") as gateway:
        gateway.http.headers["authorization"] = "Bearer ann-key"
        assert (await gateway.chat(n=4)).status_code == 200
        assert (await gateway.chat()).json()["error"]["type"] == "requests"
    (tmp_path / "keys").write_text(f"sha256:{hash_key('ann-key')} tpm=30 ann\n")
    for path, body in (
        ("/detokenize", {"tokens": [5] * 40}),
        ("/tokenize", {"prompt": "a b c d e f g h i j k l m n o p " * 4}),
        (CHAT, {"messages": TURNS, "structured_outputs": {"choice": ["yes" * 150]}}),
    ):
        async with answering(FakeConductor(), api_keys=tmp_path / "keys") as gateway:
            gateway.http.headers["authorization"] = "Bearer ann-key"
            assert (await gateway.http.post(path, json=body)).status_code == 200
            assert (await gateway.chat()).json()["error"]["type"] == "tokens", path


async def test_more_tokens_than_the_model_takes_are_not_spelt() -> None:
    async with answering(FakeConductor()) as gateway:
        refused = await gateway.http.post("/detokenize", json={"tokens": [5] * 101})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "tokens: has more than 100 tokens, the model's length"
