"""`/score` and `/rerank`: the cosine of embeddings, in the forms of vLLM, Jina and Cohere."""

import math
import struct
from typing import Any

import pytest

from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb

from .fakes import MODEL, answering

DEGREES = {"east": 0, "north-east": 45, "north": 90, "west": 180}
"""Texts with the angle of their embeddings."""


def script(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    placed, *rest = answer([1], prompt_tokens=3)
    angle = math.radians(DEGREES[request.text])
    values = pb.PromptEmbedding(values=struct.pack("<2f", math.cos(angle), math.sin(angle)))
    return [placed, pb.GenerateResponse(embedding=values), *rest]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("east", "north-east", [math.sqrt(0.5)]),
        ("east", ["east", "north", "west"], [1, 0, -1]),
        (["east", "west"], ["west", "west"], [-1, 1]),
    ],
)
async def test_scores(path: str, names: tuple[str, str], first: Any, second: Any, scores: list[float]) -> None:
    async with answering(FakeConductor(script)) as gateway:
        body = (await gateway.http.post(path, json=dict(zip(names, (first, second), strict=True)))).json()
        assert [each["index"] for each in body["data"]] == list(range(len(scores)))
        assert [each["score"] for each in body["data"]] == pytest.approx(scores, abs=1e-6)
        assert (body["object"], body["model"]) == ("list", MODEL)
        assert body["usage"]["total_tokens"] == 3 * len(gateway.fake.requests)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(("more", "order"), [({}, [1, 2, 0]), ({"top_n": 2}, [1, 2]), ({"top_n": 0}, [1, 2, 0])])
async def test_documents_come_in_the_order_of_their_scores(path: str, more: dict[str, int], order: list[int]) -> None:
    async with answering(FakeConductor(script)) as gateway:
        ask = {"query": "east", "documents": ["west", {"text": "east"}, "north"], **more}
        found = (await gateway.http.post(path, json=ask)).json()["results"]
        assert [each["index"] for each in found] == order
        assert found[0]["document"] == {"text": "east"}
        assert found[0]["relevance_score"] == pytest.approx(1)
        bare = (await gateway.http.post(path, json={**ask, "return_documents": False})).json()["results"]
        assert [sorted(each) for each in bare] == [["index", "relevance_score"]] * len(order)


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/score", {"text_1": "east"}, "text_2"),
        ("/score", {}, "text_1"),
        ("/score", {"text_1": ["east", "west"], "text_2": "east"}, "text_1"),
        ("/score", {"text_1": "east", "text_2": ["east", ""]}, "text_2"),
        ("/score", {"text_1": "east", "text_2": "west", "queries": "east"}, "queries"),
        ("/score", {"text_1": "east", "text_2": "west", "instruction": "x"}, "instruction"),
        ("/rerank", {"query": "", "documents": ["east"]}, "query"),
        ("/rerank", {"query": "east", "documents": []}, "documents"),
        ("/rerank", {"query": "east", "documents": ["east"] * 2048}, None),
        ("/rerank", {"query": "east", "documents": ["east"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "east", "documents": ["west", {"text": "east", "novel": 1}]}, "documents.1.novel"),
        ("/rerank", {"query": "east", "documents": ["east"], "stream": True}, "stream"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], place: str | None) -> None:
    async with answering(FakeConductor(script)) as gateway:
        refused = await gateway.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, place)
        assert gateway.fake.requests == []
