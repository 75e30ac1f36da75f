"""Pictures in requests: from each API's form to the conductor, and what is refused before."""

import base64
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import ChatOptions, Tokenizer
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.pictures.limits import MAX_BYTES, MAX_PICTURES
from moonpool.base.pictures.rule import with_pictures
from moonpool.client import Picture
from moonpool.client.testing import FakeConductor
from tests.pictures import picture_file, picture_model, square_model
from tests.unit.gateway.fakes import CHAT, Answers, answering

ASK = {"type": "text", "text": "What is it?"}


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def chat(*parts: dict[str, Any], role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts), **fields}], "max_tokens": 4}


def chat_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def block(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


async def test_whether_the_model_takes_pictures_is_told(tmp_path: Path) -> None:
    folder = picture_model(tmp_path / "tiny-smolvlm")
    for model, texts, kinds in (("tiny", None, ["text"]), (str(folder), Tokenizer.load(folder), ["text", "image"])):
        async with answering(FakeConductor(), texts, model=model) as gateway:
            (card,) = (await gateway.http.get("/v1/models")).json()["data"]
            assert card["architecture"] == {"input_modalities": kinds}
            shown = (await gateway.http.post("/api/show", json={"model": "tiny"})).json()
            assert ("vision" in shown["capabilities"]) == ("image" in kinds)


@pytest.mark.parametrize("way", ["chat", "responses", "messages", "tool result", "ollama"])
async def test_each_api_sends_texts_and_pictures_in_their_order(gateway: Answers, way: str) -> None:
    pytest.importorskip("PIL")
    content = picture_file(30, 20)
    data = base64.b64encode(content).decode()
    match way:
        case "chat":
            path, body = CHAT, chat(ASK, image(data_url(content), detail="low"))
        case "responses":
            part = {"type": "input_image", "image_url": data_url(content), "detail": "low"}
            parts = [{"type": "input_text", "text": "What is it?"}, part]
            path, body = "/v1/responses", {"input": [{"role": "user", "content": parts}]}
        case "ollama":
            sent = {"role": "user", "content": "What is it?", "images": [data]}
            path, body = "/api/chat", {"model": "tiny", "messages": [sent]}
        case "messages":
            path, body = "/v1/messages", chat(ASK, block(data))
        case _:
            result = {"type": "tool_result", "tool_use_id": "c1", "content": [ASK, block(data)]}
            call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}]
            path, body = "/v1/messages", {"messages": [*turns, {"role": "user", "content": [result]}], "max_tokens": 4}
    answered = await gateway.http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    (asked,) = gateway.fake.requests
    turn = asked.chat.messages[-1]
    assert turn.role == ("tool" if way == "tool result" else "user")
    assert turn.content == ""
    text, shown = reversed(turn.parts) if way == "ollama" else turn.parts
    assert text.text == "What is it?"
    assert (shown.picture.content, shown.picture.width, shown.picture.height) == (content, 30, 20)
    assert shown.picture.detail == ("low" if way in ("chat", "responses") else "")


LONG = "A" * (MAX_BYTES // 3 * 4 + 64)
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a page elsewhere": (image("http://169.254.169.254/latest"), ".image_url.url", "not fetched"),
    "a file": (image("file:///etc/passwd"), ".image_url.url", "plain https URL"),
    "no data": (image("data:image/png,abc"), ".image_url.url", "base64"),
    "data that is no picture": (image("data:text/html;base64,QQ=="), ".image_url.url", "data:image"),
    "no base64": (image("data:image/png;base64,@@@"), ".image_url.url", "no base64"),
    "too long": (image(f"data:image/png;base64,{LONG}"), ".image_url.url", "more than"),
    "no url": ({"type": "image_url"}, "", "has no picture"),
    "a source elsewhere": (
        {"type": "image", "source": {"type": "url", "url": "http://x"}},
        ".source.url",
        "not fetched",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_no_picture_is_refused_by_name(gateway: Answers, what: str) -> None:
    part, place, why = REFUSED[what]
    refused = await gateway.http.post(CHAT, json=chat(ASK, part))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == f"messages.0.content.1{place}"
    assert why in error["message"]
    assert gateway.fake.requests == []


async def test_a_file_that_is_no_picture_is_refused_by_its_place(gateway: Answers) -> None:
    pytest.importorskip("PIL")
    for content, why in ((b"no picture", "is none of"), (picture_file(64, 64)[:-40], "cut or damaged")):
        refused = await gateway.http.post(CHAT, json=chat(ASK, image(data_url(content))))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages.0.content.1.image_url.url"
        assert why in refused.json()["error"]["message"]
    assert gateway.fake.requests == []


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_only_users_and_tools_have_pictures(gateway: Answers, role: str) -> None:
    refused = await gateway.http.post(CHAT, json=chat(image(data_url(b"x")), role=role))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content")
    assert role in refused.json()["error"]["message"]


async def test_too_many_pictures(gateway: Answers) -> None:
    refused = await gateway.http.post(CHAT, json=chat(*[image(data_url(b"x"))] * (MAX_PICTURES + 1)))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert f"at most {MAX_PICTURES}" in refused.json()["error"]["message"]


@pytest.fixture(params=["squares", "text around"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return {"squares": picture_model, "text around": square_model}[request.param](tmp_path / "tiny")


async def test_tokens_of_pictures_are_counted_as_the_conductor_makes_them(folder: Path) -> None:
    pytest.importorskip("PIL")
    texts, content = Tokenizer.load(folder), picture_file(70, 40)
    rule = read_rule(folder, lambda: texts)
    assert not isinstance(rule, str)
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is it <image>?"}]}]
    chat = texts.render_chat(shown, (), ChatOptions())
    chat = chat if rule.written is None else chat.with_text(*rule.written)
    right, _ = with_pictures("messages", rule, texts.encode_chat(chat), [Picture(content, 70, 40)])
    data, text = base64.b64encode(content).decode(), {"type": "text", "text": "Is it <image>?"}
    fake = FakeConductor()
    async with answering(fake, texts, model=str(folder)) as gateway:
        fake.state.model.max_tokens = 500
        counted = await gateway.http.post("/v1/messages/count_tokens", json=chat_of(block(data), text))
        assert counted.json() == {"input_tokens": len(right)}
        told = [{"type": "input_image", "image_url": data_url(content)}, {**text, "type": "input_text"}]
        asked = {"input": [{"role": "user", "content": told}]}
        counted = await gateway.http.post("/v1/responses/input_tokens", json=asked)
        assert counted.json()["input_tokens"] == len(right)
        body = chat_of(image(data_url(content)), text)
        assert (await gateway.http.post("/tokenize", json=body)).json()["tokens"] == right.tolist()
    short = FakeConductor()
    async with answering(short, texts, model=str(folder)) as gateway:
        short.state.model.max_tokens = len(right) - 1
        refused = await gateway.http.post("/tokenize", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_tokens_of_pictures_are_refused_where_there_are_none(gateway: Answers) -> None:
    pytest.importorskip("PIL")
    blind = await gateway.http.post("/tokenize", json=chat_of(image(data_url(picture_file(9, 9)))))
    assert (blind.status_code, blind.json()["error"]["param"]) == (400, "messages")
    assert "tiny takes no pictures" in blind.json()["error"]["message"]
    damaged = await gateway.http.post("/v1/messages/count_tokens", json=chat_of(block("QQ==")))
    assert "is none of PNG" in damaged.json()["error"]["message"]


@pytest.mark.parametrize("field", ["return_token_ids", "add_special_tokens"])
async def test_prompts_with_pictures_are_not_sent_as_tokens(gateway: Answers, field: str) -> None:
    refused = await gateway.http.post(CHAT, json=chat(image(data_url(b"x"))) | {field: True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "cannot be sent as tokens" in refused.json()["error"]["message"]
    assert gateway.fake.requests == []
