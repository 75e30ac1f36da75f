"""Files and batches: what a client of OpenAI's interface sees, the order of lines, retries, ends and new starts."""

import asyncio
import json
import os
import sqlite3
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx2
import pytest

from moonpool.base import world
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.errors import Overloaded, Unavailable
from moonpool.base.json_parts import UNCHECKED_BYTES
from moonpool.base.rpc.api_keys import hash_key
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.gateway import service
from moonpool.gateway.batches import runner as running
from moonpool.gateway.batches import store
from moonpool.gateway.batches.in_process import InProcessResponse
from moonpool.gateway.batches.lines import PIECE_BYTES, InputFile
from moonpool.gateway.batches.store import BatchStore, Status, StoredBatch, StoredLine
from moonpool.gateway.serving import cluster_state
from moonpool.v1 import conductor_pb2 as pb

from .fakes import ready, settings

ENDPOINT = "/v1/chat/completions"
WAIT_S = 30.0


@asynccontextmanager
async def gateway(
    folder: Path, fake: FakeConductor, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """A gateway with a folder of batches, in front of a conductor in memory."""
    monkeypatch.setattr(service, "AsyncClient", lambda *_, **__: fake.async_client())
    monkeypatch.setattr(running, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(running, "LOOK_S", 0.001)
    monkeypatch.setattr(cluster_state, "MAX_AGE_S", -1.0)  # a test's change of the queue holds at once
    config = settings(batch_dir=folder, **changes)
    async with service.application(config, Tokenizer.load(model_dir()), PrometheusMetrics("gateway")) as (app, _):
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield http


def line(name: str, text: str, **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body, **changes}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def upload(http: httpx2.AsyncClient, content: bytes, **headers: str) -> str:
    files = {"file": ("in.jsonl", content, "application/jsonl")}
    sent = await http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)
    assert sent.status_code == 200, sent.text
    told = sent.json()
    assert (told["bytes"], told["purpose"], told["filename"]) == (len(content), "batch", "in.jsonl")
    return str(told["id"])


async def start(http: httpx2.AsyncClient, file: str, endpoint: str = ENDPOINT, **headers: str) -> str:
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", "metadata": {"a": "b"}}
    made = await http.post("/v1/batches", json=body, headers=headers)
    assert made.status_code == 200, made.text
    assert made.json()["status"] == "validating"
    return str(made.json()["id"])


OVER = ("completed", "failed", "cancelled", "expired")


async def ended(http: httpx2.AsyncClient, batch: str, statuses: Sequence[str] = OVER, **headers: str) -> dict[str, Any]:
    """The batch once it is over, or has one of other statuses."""
    async with asyncio.timeout(WAIT_S):
        while True:
            told: dict[str, Any] = (await http.get(f"/v1/batches/{batch}", headers=headers)).json()
            if told["status"] in statuses:
                return told
            await asyncio.sleep(0.005)


async def answers(http: httpx2.AsyncClient, file: str, **headers: str) -> list[dict[str, Any]]:
    content = await http.get(f"/v1/files/{file}/content", headers=headers)
    return [json.loads(each) for each in content.text.splitlines()]


def prompts_of(requests: list[pb.GenerateRequest]) -> list[str]:
    return [request.chat.messages[0].content for request in requests]


async def test_a_batch_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ready(FakeConductor(lambda request: answer((1, 2), prompt_tokens=3)))
    async with gateway(tmp_path, fake, monkeypatch) as http:
        file = await upload(http, jsonl(line("b", "two"), line("a", "one"), line("bad", "x", body={"messages": 5})))
        batch = await start(http, file)
        told = await ended(http, batch)
        assert told["status"] == "completed"
        assert told["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert (told["metadata"], told["input_file_id"]) == ({"a": "b"}, file)
        output = await answers(http, told["output_file_id"])
        assert [each["custom_id"] for each in output] == ["b", "a"], "in the order of the input"
        assert output[0]["response"]["status_code"] == 200
        assert output[0]["response"]["body"]["choices"][0]["finish_reason"]
        assert output[0]["response"]["request_id"]
        [wrong] = await answers(http, told["error_file_id"])
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("bad", 400)
        assert wrong["response"]["body"]["error"]["param"] == "messages"
        assert all(request.priority == 100 for request in fake.requests)
        listed = (await http.get("/v1/batches")).json()
        assert ([each["id"] for each in listed["data"]], listed["has_more"]) == ([batch], False)
        purposes = [each["purpose"] for each in (await http.get("/v1/files")).json()["data"]]
        assert sorted(purposes) == ["batch", "batch_output", "batch_output"]
        assert (await http.delete(f"/v1/files/{file}")).json()["deleted"]
        assert (await http.get(f"/v1/files/{file}")).status_code == 404
    assert not readable_by_others(tmp_path), "users' texts are this user's alone"


def readable_by_others(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.stat().st_mode & 0o077]


async def test_lines_run_in_the_order_of_their_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    fake.answers["AnnouncePromptsRequest"] = pb.AnnouncePromptsResponse()
    names = [f"{question} {document}" for question in range(4) for document in "cab"]
    lines = [line(name, f"{name[2] * 300} question {name[0]}") for name in names]
    async with gateway(tmp_path, fake, monkeypatch, batch_concurrency=1) as http:
        batch = await start(http, await upload(http, jsonl(*lines)))
        told = await ended(http, batch)
        assert [each["custom_id"] for each in await answers(http, told["output_file_id"])] == names
    ran = [(text[0], text[-1]) for text in prompts_of(fake.requests)]
    assert ran == [(document, str(question)) for document in "abc" for question in range(4)]
    announced = [each for each in fake.asked if isinstance(each, pb.AnnouncePromptsRequest)]
    first = [each.requests[0].chat.messages[0].content[0] for each in announced]
    assert first == ["a", "b", "c"], "a document is announced once"


WRONG = {
    "not JSON": (b"{", "invalid_json_line"),
    "a list": (b"[]", "invalid_json_line"),
    "no id": (jsonl({"url": ENDPOINT, "body": {}}), "missing_required_parameter"),
    "no body": (jsonl({"custom_id": "a", "url": ENDPOINT}), "missing_required_parameter"),
    "other endpoint": (jsonl(line("a", "x", url="/v1/completions")), "mismatched_endpoint"),
    "method": (jsonl(line("a", "x", method="GET")), "invalid_method"),
    "twice": (jsonl(line("a", "x"), line("a", "y")), "duplicate_custom_id"),
    "stream": (jsonl(line("a", "x", body={"stream": True})), "invalid_request"),
    "nothing": (b"\n\n", "empty_file"),
    "deep": (b"[" * 4000, "invalid_json_line"),
    "long": (jsonl(line("a", "x" * 5000)), "line_too_long"),
    "longer": (jsonl(line("a", "x" * 50_000)), "line_too_long"),
    "empty id": (jsonl(line("", "x")), "missing_required_parameter"),
    "long id": (jsonl(line("a" * 600, "x")), "missing_required_parameter"),
}


def read(path: Path) -> InputFile:
    """A file whose lines have at most 4 KiB."""
    file = InputFile(path, ENDPOINT, 4096)
    while file.read_on():
        pass
    return file


def test_a_file_is_read_piece_by_piece(tmp_path: Path) -> None:
    """No piece is much longer than `PIECE_BYTES`; of long prompts little is kept; equal beginnings stay together."""
    prompts = [f"{'x' * 4000}{document * 4000}{question}" for question in range(40) for document in "cab"]
    lines = jsonl(*(line(str(number), prompt) for number, prompt in enumerate(prompts)))
    (tmp_path / "in").write_bytes(lines)
    file, pieces = InputFile(tmp_path / "in", ENDPOINT, 1 << 20), 1
    while file.read_on():
        pieces += 1
    assert not file.errors
    assert pieces == pytest.approx(len(lines) / PIECE_BYTES, abs=1)
    documents = [prompts[each.number][4000] for each in file.lines()]
    assert documents in ([*x * 40, *y * 40, *z * 40] for x, y, z in permutations("abc"))


def test_a_line_has_as_many_parts_as_a_body(tmp_path: Path) -> None:
    wide = {"custom_id": "a", "url": ENDPOINT, "body": {"messages": [[]] * 10_000, "user": "x" * UNCHECKED_BYTES}}
    (tmp_path / "in").write_bytes(jsonl(wide))
    file = InputFile(tmp_path / "in", ENDPOINT, 1 << 20)
    assert not file.read_on()
    assert [error.code for error in file.errors] == ["line_too_long"]
    assert "arrays" in file.errors[0].message


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_line(case: str, tmp_path: Path) -> None:
    content, code = WRONG[case]
    (tmp_path / "in").write_bytes(jsonl(line("good", "x")) * (case not in ("nothing", "twice")) + content)
    errors = read(tmp_path / "in").errors
    assert [error.code for error in errors] == [code]
    assert errors[0].number == (1 if case == "nothing" else 2)


async def test_a_batch_with_a_wrong_line_fails_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    async with gateway(tmp_path, fake, monkeypatch) as http:
        told = await ended(http, await start(http, await upload(http, jsonl(line("a", "x")) + b"{")))
        assert told["status"] == "failed"
        assert told["errors"]["data"] == [
            {"code": "invalid_json_line", "line": 2, "message": "this line is not JSON", "param": None}
        ]
    assert not fake.requests


async def test_a_full_cluster_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[Script] = [[Overloaded("full", reason="queue_full", retry_after_s=1.0)] for _ in range(3)]
    fake = ready(FakeConductor(lambda request: scripts.pop() if scripts else answer((1,), prompt_tokens=3)))
    async with gateway(tmp_path, fake, monkeypatch) as http:
        told = await ended(http, await start(http, await upload(http, jsonl(line("a", "x")))))
        assert told["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert len(fake.requests) == 4


async def test_a_line_that_cannot_be_served_is_an_error_after_a_few_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect that a request meets each time holds up no other line, and costs its tries alone."""

    def script(request: pb.GenerateRequest) -> Script:
        if request.chat.messages[0].content == "x":
            raise ValueError("a defect")
        return answer((1,), prompt_tokens=3)

    fake = ready(FakeConductor(script))
    async with gateway(tmp_path, fake, monkeypatch, batch_concurrency=1) as http:
        told = await ended(http, await start(http, await upload(http, jsonl(line("a", "x"), line("b", "y")))))
        assert told["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        [wrong] = await answers(http, told["error_file_id"])
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("a", 500)
    assert prompts_of(fake.requests).count("x") == running.MAX_TRIES


async def test_slots_come_back_from_a_batch_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a line that had not begun, and of a store that failed on the way; a batch that is over stays so."""
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    read_line, failing = BatchStore.read_line, [True, True]

    async def read(store: BatchStore, file_id: str, each: StoredLine) -> bytes:
        if failing:
            failing.pop()
            raise Unavailable("the disk is full")
        return await read_line(store, file_id, each)

    monkeypatch.setattr(BatchStore, "read_line", read)
    async with gateway(tmp_path, fake, monkeypatch, batch_concurrency=1) as http:
        file = await upload(http, jsonl(line("a", "x"), line("b", "y")))
        told = await ended(http, await start(http, file))
        assert told["request_counts"]["completed"] == 2
        assert (await http.post(f"/v1/batches/{told['id']}/cancel")).status_code == 409
        assert await answers(http, told["output_file_id"])
        fake.state.queue.for_room = 1
        waiting = await start(http, file)
        await ended(http, waiting, ["in_progress"])
        await http.post(f"/v1/batches/{waiting}/cancel")
        assert (await ended(http, waiting))["status"] == "cancelled"
        fake.state.queue.for_room = 0
        assert (await ended(http, await start(http, file)))["request_counts"]["completed"] == 2


KEYS = "".join(f"sha256:{hash_key(name)} {name}\n" for name in ("ann", "bob"))
ANN, BOB = {"authorization": "Bearer ann"}, {"authorization": "Bearer bob"}


async def test_tenants_take_turns_at_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches one has."""
    (tmp_path / "keys").write_text(KEYS)
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    fake.state.queue.for_room = 1  # so that nothing begins
    async with gateway(tmp_path / "b", fake, monkeypatch, api_keys=tmp_path / "keys", batch_concurrency=1) as http:
        file = await upload(http, jsonl(*(line(str(number), f"{number}") for number in range(4))), **ANN)
        many = [await start(http, file, **ANN) for _ in range(8)]
        for batch in many:
            await ended(http, batch, ["in_progress"], **ANN)
        few = await start(http, await upload(http, jsonl(line("a", "b"), line("c", "d")), **BOB), **BOB)
        for _ in range(3):  # the later looks come behind the batch's own work on the store's thread
            await ended(http, few, ["in_progress"], **BOB)
        fake.state.queue.for_room = 0
        assert (await ended(http, few, **BOB))["request_counts"]["completed"] == 2
        tenants = "".join(request.tenant[0] for request in fake.requests)
        before = tenants[: tenants.rindex("b")]
        assert before.count("a") <= before.count("b") + 2, tenants
        for batch in many:
            assert (await ended(http, batch, **ANN))["request_counts"]["completed"] == 4


async def test_a_tenant_has_so_many_batches_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(KEYS)
    monkeypatch.setattr(store, "MAX_UNDER_WAY", 2)
    monkeypatch.setattr(store, "MAX_KEPT", 3)
    monkeypatch.setattr(store, "MAX_FILES", 9)
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    body = {"endpoint": ENDPOINT, "completion_window": "24h"}
    async with gateway(tmp_path / "b", fake, monkeypatch, api_keys=tmp_path / "keys") as http:
        fake.state.queue.for_room = 1  # so that nothing begins
        body["input_file_id"] = file = await upload(http, jsonl(line("a", "x")), **ANN)
        batches = [await start(http, file, **ANN) for _ in range(2)]
        refused = await http.post("/v1/batches", json=body, headers=ANN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
        await start(http, await upload(http, jsonl(line("a", "x")), **BOB), **BOB)
        fake.state.queue.for_room = 0
        for _ in range(3):
            for batch in batches:
                await ended(http, batch, **ANN)
            batches.append(await start(http, file, **ANN))
        await ended(http, batches[-1], **ANN)
        seen = list[str]()
        while True:
            page = (await http.get("/v1/batches", params={"limit": 2, "after": seen[-1:]}, headers=ANN)).json()
            seen += [each["id"] for each in page["data"]]
            if not page["has_more"]:
                break
        assert len(seen) == 4, "those under way, and of the others the newest"
        for _ in range(9 - 6):
            await upload(http, b"x", **ANN)
        full = await http.post("/v1/files", data={"purpose": "x"}, files={"file": ("f", b"x" * 20_000)}, headers=ANN)
        assert (full.status_code, full.json()["error"]["code"]) == (413, "file_too_large")
        refused = await http.post("/v1/batches", json=body, headers=ANN)
        assert refused.json()["error"]["code"] == "too_many_batches", "answers would be files, too"


async def test_files_that_come_at_once_have_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, begun, half = ready(FakeConductor()), asyncio.Event(), asyncio.Event()
    async with gateway(tmp_path, fake, monkeypatch, batch_bytes=100_000) as http:
        head = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        head += b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        kind = {"content-type": "multipart/form-data; boundary=b"}

        async def slow() -> AsyncIterator[bytes]:
            yield head + b"x" * 80_000
            begun.set()  # the gateway asks for more
            await half.wait()
            yield b"\r\n--b--\r\n"

        first = asyncio.create_task(http.post("/v1/files", content=slow(), headers=kind))
        await asyncio.wait_for(begun.wait(), WAIT_S)
        second = await http.post("/v1/files", content=head + b"x" * 50_000, headers=kind)
        assert (second.status_code, second.json()["error"]["code"]) == (413, "file_too_large")
        half.set()
        assert (await first).status_code == 200
        await upload(http, b"x" * 5_000)


async def test_interactive_requests_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    fake.state.queue.for_room = 1
    looked = asyncio.Event()
    sleeping = asyncio.sleep

    async def sleep(seconds: float) -> None:
        looked.set()
        fake.state.queue.for_room = 0
        assert not fake.requests, "no line begins while a request waits"
        await sleeping(0)

    monkeypatch.setattr(running.BatchRunner.__init__, "__defaults__", (sleep,))
    async with gateway(tmp_path, fake, monkeypatch) as http:
        batch = await start(http, await upload(http, jsonl(line("a", "x"))))
        await asyncio.wait_for(looked.wait(), WAIT_S)
        assert batch


async def test_a_new_gateway_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are there stay; lines that were under way run again."""
    held = asyncio.Event()

    def script(request: pb.GenerateRequest) -> Script:
        text = request.chat.messages[0].content
        if text == "c" and not held.is_set():
            held.set()
            raise asyncio.CancelledError  # as a gateway that ends in the midst of it
        return answer((1,), prompt_tokens=3)

    first = ready(FakeConductor(script))
    async with gateway(tmp_path, first, monkeypatch, batch_concurrency=1) as http:
        batch = await start(http, await upload(http, jsonl(*(line(each, each) for each in "abcd"))))
        await asyncio.wait_for(held.wait(), WAIT_S)
    second = ready(FakeConductor(script))
    async with gateway(tmp_path, second, monkeypatch, batch_concurrency=1) as http:
        told = await ended(http, batch)
        assert told["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert [each["custom_id"] for each in await answers(http, told["output_file_id"])] == list("abcd")
    assert prompts_of(first.requests)[:2] == ["a", "b"]
    assert prompts_of(second.requests) == ["c", "d"]


async def test_a_gateway_that_ends_before_it_notes_a_batchs_end_leaves_no_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, failing = BatchStore.change, [True]

    async def changed(store: BatchStore, batch: StoredBatch, status: Status, **fields: Any) -> StoredBatch:
        if status == "completed" and failing:
            failing.pop()
            raise Unavailable("killed")
        return await change(store, batch, status, **fields)

    monkeypatch.setattr(BatchStore, "change", changed)
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    async with gateway(tmp_path, fake, monkeypatch) as http:
        told = await ended(http, await start(http, await upload(http, jsonl(line("a", "x")))))
        assert not failing
        assert len(await answers(http, told["output_file_id"])) == 1
        purposes = [each["purpose"] for each in (await http.get("/v1/files")).json()["data"]]
        assert sorted(purposes) == ["batch", "batch_output"]


async def test_batches_of_models_without_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their requests have no priority and are not announced; lines with a common text follow each other."""

    def script(request: pb.GenerateRequest) -> Script:
        placed, *rest = answer((1,), prompt_tokens=3)
        values = pb.PromptEmbedding(values=struct.pack("<2f", 1.0, float(len(request.text))))
        return [placed, pb.GenerateResponse(embedding=values), *rest]

    fake = ready(FakeConductor(script))
    pairs = [("a" * 300, "x"), ("b" * 300, "x"), ("a" * 300, "y")]
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/rerank": [{"query": first, "documents": [second]} for first, second in pairs],
        "/v1/score": [{"text_1": first, "text_2": second} for first, second in pairs],
    }
    async with gateway(tmp_path, fake, monkeypatch, batch_concurrency=1) as http:
        for url, each in bodies.items():
            fake.requests.clear()
            lines = [line(str(number), "", url=url, body=body) for number, body in enumerate(each)]
            told = await ended(http, await start(http, await upload(http, jsonl(*lines)), url))
            assert told["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
            assert [each["custom_id"] for each in await answers(http, told["output_file_id"])] == ["0", "1", "2"]
            asked = [request.text[0] for request in fake.requests if len(request.text) > 1]
            assert asked == ["a", "a", "b"]
            assert not any(request.priority for request in fake.requests)


async def test_a_batch_is_cancelled_or_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    fake.state.queue.for_room = 1  # so that nothing begins
    async with gateway(tmp_path, fake, monkeypatch) as http:
        file = await upload(http, jsonl(line("a", "x"), line("b", "y")))
        batch = await start(http, file)
        await ended(http, batch, ["in_progress"])
        busy = await http.delete(f"/v1/files/{file}")
        assert (busy.status_code, busy.json()["error"]["param"]) == (400, "file_id")
        assert (await http.post(f"/v1/batches/{batch}/cancel")).json()["status"] == "cancelling"
        told = await ended(http, batch)
        assert (told["status"], told["request_counts"]["failed"]) == ("cancelled", 2)
        codes = [each["error"]["code"] for each in await answers(http, told["error_file_id"])]
        assert codes == ["batch_cancelled"] * 2
        assert (await http.post(f"/v1/batches/{batch}/cancel")).status_code == 409

        later = world.unix_time() + 2 * 86_400
        batch = await start(http, file)
    monkeypatch.setattr(world, "unix_time", lambda: later)
    async with gateway(tmp_path, fake, monkeypatch) as http:
        told = await ended(http, batch)
        assert told["status"] == "expired"
        codes = [each["error"]["code"] for each in await answers(http, told["error_file_id"])]
        assert codes == ["batch_expired"] * 2


class Request:
    """Stands for the client of a batch's lines: a request that takes some passes of the loop to leave."""

    def __init__(self) -> None:
        self.begun, self.left = asyncio.Event(), False

    async def post(self, path: str, body: bytes, tenant: str) -> InProcessResponse:
        if path != ENDPOINT:  # an announcement
            return InProcessResponse(200, b"", "")
        self.begun.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            self.left = True


async def nobody_waits() -> int:
    return 0


@asynccontextmanager
async def runner(
    folder: Path,
    client: Any,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    waiting: Callable[[], Awaitable[int]] = nobody_waits,
    lines: int = 1,
) -> AsyncIterator[tuple[running.BatchRunner, StoredBatch]]:
    """A runner of one line at once without a gateway, and a batch of some lines that has not begun."""
    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1) as reading:
        kept = BatchStore(folder, 1 << 20, threads, world.unix_time)
        file, content = kept.new_file_id(), jsonl(*(line(str(number), "x") for number in range(lines)))
        kept.path(file).write_bytes(content)
        now = kept.now()
        await kept.add_file("t", store.StoredFile(file, "in", "batch", len(content), now))
        body = {"id": "batch_1", "input_file_id": file, "endpoint": ENDPOINT, "created_at": now}
        batch = StoredBatch("t", "validating", {**body, "expires_at": now + 3600})
        await kept.add_batch(batch)
        made = running.BatchRunner(kept, client, TenantTurns(reading), waiting, 1, 1 << 16, sleep)
        try:
            yield made, batch
        finally:
            await made.close()
            threads.submit(kept.close).result()


async def test_a_batch_is_cancelled_once_its_requests_have_left(tmp_path: Path) -> None:
    client = Request()
    async with runner(tmp_path, client) as (made, batch):
        made.start(batch)
        await asyncio.wait_for(client.begun.wait(), WAIT_S)
        await made.cancel(await made.store.batch("t", batch.id))
        assert client.left


async def test_no_more_lines_begin_at_once_than_may_run(tmp_path: Path) -> None:
    client, looks = Request(), 0

    async def waiting() -> int:
        nonlocal looks
        looks += 1
        return 0

    async with runner(tmp_path, client, waiting=waiting, lines=3) as (made, batch):
        made.start(batch)
        await asyncio.wait_for(client.begun.wait(), WAIT_S)
        assert looks == 1, "each line looks before it begins"


async def test_a_line_looks_now_and_then_whether_interactive_requests_wait(tmp_path: Path) -> None:
    client, found, pauses = Request(), [2, 1], list[float]()

    async def waiting() -> int:
        return found.pop() if found else 0

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async with runner(tmp_path, client, sleep, waiting) as (made, batch):
        made.start(batch)
        await asyncio.wait_for(client.begun.wait(), WAIT_S)
    assert pauses == [running.LOOK_S] * 2


async def test_a_batch_waits_longer_and_longer_for_a_store_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, enough, failures = list[float](), asyncio.Event(), 0

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            enough.set()
            await asyncio.Event().wait()

    async def fail(*_: object) -> None:
        nonlocal failures
        failures += 1
        if failures > 12:
            enough.set()
            await asyncio.Event().wait()
        raise Unavailable("the disk is full")

    monkeypatch.setattr(BatchStore, "put_lines", fail)
    async with runner(tmp_path, Request(), sleep) as (made, batch):
        made.start(batch)
        await asyncio.wait_for(enough.wait(), WAIT_S)
    assert failures == len(pauses) == 12, "a pause after each failure"
    most = [min(running.MAX_PAUSE_S, running.FIRST_PAUSE_S * 2.0**number) for number in range(12)]
    assert all(longest / 2 <= pause <= longest for pause, longest in zip(pauses, most, strict=True))


async def test_files_with_an_end_go_then_and_not_under_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    fake.state.queue.for_room = 1  # so that nothing begins
    now = [began := world.unix_time()]
    monkeypatch.setattr(world, "unix_time", lambda: now[0])
    ends = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    async with gateway(tmp_path, fake, monkeypatch) as http:
        kept = await upload(http, jsonl(line("a", "x")))
        sent = (await http.post("/v1/files", data=ends, files={"file": ("in.jsonl", jsonl(line("a", "x")))})).json()
        assert sent["expires_at"] - sent["created_at"] == 3600
        body = {"input_file_id": sent["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        body["output_expires_after"] = {"anchor": "created_at", "seconds": 7200}
        made = (await http.post("/v1/batches", json=body)).json()
        assert "output_expires_after" not in made
        now[0] = began + 4000
        await ended(http, made["id"], ["in_progress"])
        assert (await http.get(f"/v1/files/{sent['id']}")).status_code == 200, "a batch reads the file"
        fake.state.queue.for_room = 0
        told = await ended(http, made["id"])
        assert (told["status"], told["request_counts"]["completed"]) == ("completed", 1)
        assert [each["id"] for each in (await http.get("/v1/files", params={"purpose": "batch"})).json()["data"]] == [
            kept
        ]
        output = (await http.get(f"/v1/files/{told['output_file_id']}")).json()
        assert output["expires_at"] - output["created_at"] == 7200
        now[0] = began + 20_000
        assert (await http.get(f"/v1/files/{told['output_file_id']}/content")).status_code == 404
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept], "the bytes are gone, too"


async def test_a_file_whose_time_is_over_makes_room_and_one_that_is_not_noted_leaves_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    with ThreadPoolExecutor(1) as threads:
        kept = BatchStore(tmp_path, 100, threads, lambda: now[0])
        try:
            first, second = (store.StoredFile(kept.new_file_id(), "in", "batch", 60, 1000, 2000) for _ in range(2))
            for file in (first, second):
                kept.path(file.id).write_bytes(b"x" * 60)
            await kept.add_file("t", first)
            assert await kept.room("t") == 40
            now[0] = 2000.0
            assert await kept.room("t") == 100
            assert not kept.path(first.id).exists()

            def fail(_: int) -> None:
                raise OSError("no space left")

            monkeypatch.setattr(os, "fsync", fail)
            with pytest.raises(Unavailable, match="no space left"):
                await kept.add_file("t", second)
            assert not kept.path(second.id).exists()
        finally:
            threads.submit(kept.close).result()


@pytest.mark.parametrize(
    ("anchor", "seconds", "field"),
    [("created_at", "3599", "seconds"), ("created_at", "x", "seconds"), ("last_active_at", "3600", "anchor")],
)
async def test_a_wrong_end_names_the_field(
    anchor: str, seconds: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"purpose": "batch", "expires_after[anchor]": anchor, "expires_after[seconds]": seconds}
    async with gateway(tmp_path, ready(FakeConductor()), monkeypatch) as http:
        told = await http.post("/v1/files", data=form, files={"file": ("in.jsonl", b"x")})
        assert (told.status_code, told.json()["error"]["param"]) == (400, f"expires_after.{field}")


async def test_a_folder_of_version_1_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(tmp_path, ready(FakeConductor()), monkeypatch) as http:
        file = await upload(http, b"x")
    with closing(sqlite3.connect(tmp_path / "batches.db", isolation_level=None)) as before:
        for statement in (
            "DROP INDEX files_by_end",
            "ALTER TABLE files DROP COLUMN expires_at",
            "PRAGMA user_version = 1",
        ):
            before.execute(statement)
    async with gateway(tmp_path, ready(FakeConductor()), monkeypatch) as http:
        told = (await http.get(f"/v1/files/{file}")).json()
        assert (told["id"], told["expires_at"]) == (file, None)


async def test_tenants_see_their_own_and_have_room_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{hash_key('ann')} ann\nsha256:{hash_key('bob')} bob\n")
    fake = ready(FakeConductor(lambda request: answer((1,), prompt_tokens=3)))
    ann, bob = {"authorization": "Bearer ann"}, {"authorization": "Bearer bob"}
    async with gateway(tmp_path / "batches", fake, monkeypatch, api_keys=keys, batch_bytes=20_000) as http:
        file = await upload(http, jsonl(line("a", "x")), **ann)
        batch = await start(http, file, **ann)
        await ended(http, batch, **ann)
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}"):
            assert (await http.get(path, headers=bob)).status_code == 404
            assert (await http.get(path)).status_code == 401
        assert (await http.get("/v1/files", headers=bob)).json()["data"] == []
        assert fake.requests[0].tenant == "ann"
        files = {"file": ("in.jsonl", b"x" * 40_000)}
        large = await http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=ann)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "file_too_large")
        await upload(http, b"x" * 15_000, **bob)


@pytest.mark.parametrize(
    ("form", "field"),
    [({"files": {"file": ("a", b"x")}}, "purpose"), ({"data": {"purpose": "batch"}}, "file"), ({"json": {}}, "file")],
)
async def test_a_wrong_form_names_the_field(
    form: dict[str, Any], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(tmp_path, ready(FakeConductor()), monkeypatch) as http:
        told = await http.post("/v1/files", **form)
        assert (told.status_code, told.json()["error"]["param"]) == (400, field)


async def test_without_a_folder_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ready(FakeConductor())
    monkeypatch.setattr(service, "AsyncClient", lambda *_, **__: fake.async_client())
    tokenizer = Tokenizer.load(model_dir())
    async with (
        service.application(settings(), tokenizer, PrometheusMetrics("gateway")) as (app, _),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway") as http,
    ):
        told = await http.get("/v1/batches")
        assert told.status_code == 503
        assert "batch_dir" in told.json()["error"]["message"]
