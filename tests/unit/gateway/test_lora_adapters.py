"""LoRA adapters over HTTP: named as model by every API, listed with their parent, loaded and unloaded by operators."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.base.rpc.api_keys import hash_key
from moonpool.client.testing import FakeConductor
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import CHAT, MODEL, PLAIN, TURNS, Answers, answering

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODELS = "/v1/models"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    PLAIN: {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 5},
}
SQL = kv_pb2.LoraAdapter(id=b"1" * 32, name="sql", path="/loras/sql", rank=8, base_model="base")


def with_lora() -> FakeConductor:
    fake = FakeConductor()
    fake.state.loras.append(SQL)
    return fake


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_takes_an_adapter_as_model(path: str) -> None:
    async with answering(with_lora(), served_model_name="clever,quick") as gateway:
        for given, asked in (("sql", "sql"), ("clever", ""), ("quick", "")):
            answered = await gateway.http.post(path, json={**BODIES[path], "model": given})
            assert answered.status_code == 200
            assert answered.json()["model"] == (given if given == "sql" else "clever")
            assert gateway.fake.requests[-1].model == asked
        refused = await gateway.http.post(path, json={**BODIES[path], "model": "other"})
        assert refused.status_code == 404
        assert "only 'clever', 'quick', 'sql' is served, not 'other'" in refused.text


async def test_without_other_names_the_conductor_decides() -> None:
    """The gateway's picture of the adapters may be a second old."""
    async with answering(with_lora()) as gateway:
        await gateway.chat(model="just loaded elsewhere")
        assert gateway.asked.model == "just loaded elsewhere"


async def test_requests_are_counted_by_adapter() -> None:
    async with answering(with_lora()) as gateway:
        for model in ("sql", "sql", MODEL):
            await gateway.chat(model=model)
        counted = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="%s"}'
        assert [await gateway.metric(counted % name) for name in ("sql", MODEL)] == ["2.0", "1.0"]


async def test_adapters_are_models_with_a_parent() -> None:
    async with answering(with_lora()) as gateway:
        listed = (await gateway.http.get(MODELS)).json()["data"]
        assert [(card["id"], card.get("parent")) for card in listed] == [(MODEL, None), ("sql", MODEL)]
        assert (await gateway.http.get(f"{MODELS}/sql")).json() == listed[1]
        assert "path" not in str(listed)
        answered = await gateway.http.get(MODELS, headers={"anthropic-version": "2023-06-01"})
        assert [card["id"] for card in answered.json()["data"]] == [MODEL, "sql"]
        assert (await gateway.http.get(f"{MODELS}/other")).status_code == 404


async def test_load_and_unload(gateway: Answers) -> None:
    fake = gateway.fake
    fake.answers["LoadLoraAdapterRequest"] = pb.LoadLoraAdapterResponse(lora=SQL, instances=2)
    fake.answers["UnloadLoraAdapterRequest"] = pb.UnloadLoraAdapterResponse()
    assert len((await gateway.http.get(MODELS)).json()["data"]) == 1
    answered = await gateway.http.post(LOAD, json={"lora_name": "sql", "lora_path": "sql", "load_inplace": True})
    assert (answered.status_code, answered.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert fake.asked == [pb.LoadLoraAdapterRequest(lora_name="sql", lora_path="sql", load_inplace=True)]
    fake.state.loras.append(SQL)
    assert len((await gateway.http.get(MODELS)).json()["data"]) == 2  # asked anew at once
    answered = await gateway.http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 1})
    assert (answered.status_code, answered.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert answered.headers["warning"] == '299 moonpool "ignored fields: lora_int_id"'
    assert fake.asked[-1] == pb.UnloadLoraAdapterRequest(lora_name="sql")


async def test_errors_name_the_field(gateway: Answers) -> None:
    fake = gateway.fake
    fake.answers["LoadLoraAdapterRequest"] = InvalidRequest("lora_path", "no adapter_config.json in this folder")
    fake.answers["UnloadLoraAdapterRequest"] = NotFound("no LoRA adapter 'sql' is loaded")
    answered = await gateway.http.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"})
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, "lora_path")
    assert (await gateway.http.post(UNLOAD, json={"lora_name": "sql"})).status_code == 404
    for path, body, field in (
        (LOAD, {"lora_path": "sql"}, "lora_name"),
        (LOAD, {"lora_name": "sql"}, "lora_path"),
        (LOAD, {"lora_name": "sql", "lora_path": 3}, "lora_path"),
        (LOAD, {"lora_name": "sql", "lora_path": "x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        (UNLOAD, {}, "lora_name"),
    ):
        answered = await gateway.http.post(path, json=body)
        assert (answered.status_code, answered.json()["error"]["param"]) == (400, field)


async def test_the_models_own_name_is_taken() -> None:
    async with answering(FakeConductor(), served_model_name="clever") as gateway:
        answered = await gateway.http.post(LOAD, json={"lora_name": "clever", "lora_path": "sql"})
        assert (answered.status_code, answered.json()["error"]["param"]) == (400, "lora_name")
        assert not gateway.fake.asked


async def test_operators_alone_load_and_unload(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{hash_key('one')} ops\nsha256:{hash_key('two')} guest\n")
    fake = FakeConductor()
    fake.answers["LoadLoraAdapterRequest"] = pb.LoadLoraAdapterResponse(lora=SQL)
    fake.answers["UnloadLoraAdapterRequest"] = pb.UnloadLoraAdapterResponse()
    async with answering(fake, api_keys=keys, operator_tenants="ops") as gateway:
        for path in (LOAD, UNLOAD):
            body = {"lora_name": "sql", "lora_path": "sql"} if path == LOAD else {"lora_name": "sql"}
            for key, status in (("one", 200), ("two", 403), ("three", 401)):
                headers = {"authorization": f"Bearer {key}"}
                assert (await gateway.http.post(path, json=body, headers=headers)).status_code == status
    assert len(fake.asked) == 2
