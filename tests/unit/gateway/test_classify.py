"""`/classify`, `/pooling`, and scores of pairs by a model with a head; what a model cannot do is refused by name."""

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from moonpool.base.checkpoint import Tokenizer
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.serving.label_scores import label_scores
from moonpool.v1 import conductor_pb2 as pb

from .fakes import MODEL, answering

WORDS = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "east", "west"])}


def folder(path: Path, **changed: Any) -> str:
    """The configuration of a BERT that classifies."""
    config = {
        "architectures": ["BertForSequenceClassification"], "model_type": "bert", "hidden_size": 64, "vocab_size": 8,
        "max_position_embeddings": 32, "id2label": {"0": "bad", "1": "good"}, **changed,
    }  # fmt: skip
    path.joinpath("config.json").write_text(json.dumps(config))
    path.joinpath("tokenizer.json").write_text(backend().to_str())
    return str(path)


def backend() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel(WORDS, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def words() -> Tokenizer:
    return Tokenizer(backend())


def saying(*values: float) -> FakeConductor:
    """Says of each prompt these values, plus the last word's number."""

    def script(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        placed, *rest = answer([1], prompt_tokens=3)
        more = request.tokens.token_ids[-2] if request.HasField("tokens") else 0
        packed = struct.pack(f"<{len(values)}f", *(value + more for value in values))
        return [placed, pb.GenerateResponse(embedding=pb.PromptEmbedding(values=packed)), *rest]

    return FakeConductor(script)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
@pytest.mark.parametrize(("more", "probs"), [({}, [0.25, 0.75]), ({"use_activation": False}, [0, math.log(3)])])
async def test_classes(path: str, more: dict[str, Any], probs: Sequence[float], tmp_path: Path) -> None:
    async with answering(saying(0.0, math.log(3)), words(), model=folder(tmp_path)) as gateway:
        body = (await gateway.http.post(path, json={"input": ["good", "bad"], **more})).json()
        assert [row["index"] for row in body["data"]] == [0, 1]
        for row in body["data"]:
            assert (row["label"], row["num_classes"]) == ("good", 2)
            assert row["probs"] == pytest.approx(probs)
        assert (body["model"], body["usage"]["total_tokens"]) == (MODEL, 6)
        assert all(request.sampling.embedding for request in gateway.fake.requests)


async def test_pooling(tmp_path: Path) -> None:
    async with answering(saying(0.0, math.log(3)), words(), model=folder(tmp_path)) as gateway:
        (row,) = (await gateway.http.post("/pooling", json={"input": "good"})).json()["data"]
        assert row["data"] == pytest.approx([0.25, 0.75])
    async with answering(saying(0.6, -0.8)) as gateway:
        (row,) = (await gateway.http.post("/pooling", json={"input": "good"})).json()["data"]
        assert row["data"] == pytest.approx([0.6, -0.8])


async def test_pairs_are_one_prompt_each(tmp_path: Path) -> None:
    path = folder(tmp_path, id2label={"0": "LABEL_0"})
    async with answering(saying(-6.0), words(), model=path) as gateway:
        ask: dict[str, Any] = {"query": "east", "documents": ["good", "west", "bad bad"]}
        found = (await gateway.http.post("/v1/rerank", json=ask)).json()["results"]
        assert sorted(list(request.tokens.token_ids) for request in gateway.fake.requests) == [
            [2, 6, 3, 4, 3], [2, 6, 3, 5, 5, 3], [2, 6, 3, 7, 3]
        ]  # fmt: skip
        assert [row["index"] for row in found] == [1, 2, 0]
        assert found[0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-1)))
        ask = {"text_1": "east", "text_2": ["good", "west"], "use_activation": False}
        scores = (await gateway.http.post("/v1/score", json=ask)).json()["data"]
        assert [row["score"] for row in scores] == pytest.approx([-2, 1])


async def test_a_template_with_queries_and_documents_writes_the_prompt(tmp_path: Path) -> None:
    """As vLLM's templates for rerankers; a control token in a text stays text."""
    template = (
        "{% for turn in messages %}{% if turn.role == 'query' %}[CLS] {{ turn.content }} "
        "{% elif turn.role == 'document' %}[SEP] {{ turn.content }} [SEP] good{% endif %}{% endfor %}"
    )
    made = backend()
    made.add_special_tokens(["[CLS]", "[SEP]"])
    texts = Tokenizer(made, {"default": template})
    async with answering(saying(0.0), texts, model=folder(tmp_path, id2label={"0": "LABEL_0"})) as gateway:
        asked = await gateway.http.post("/score", json={"text_1": "east [SEP]", "text_2": "west"})
        assert asked.status_code == 200
        ids = list(gateway.asked.tokens.token_ids)
        assert ids[:2] == [2, 6]
        assert ids[-4:] == [3, 7, 3, 4]
        assert ids.count(3) == 2


@pytest.mark.parametrize(
    ("path", "body", "labels", "place"),
    [
        ("/v1/embeddings", {"input": "good"}, 2, "input"),
        ("/v1/score", {"text_1": "good", "text_2": "bad"}, 2, "text_2"),
        ("/v1/score", {"text_1": "good", "text_2": "bad " * 1000}, 1, "text_2"),
        ("/v1/classify", {"input": "good"}, 0, "input"),
        ("/v1/classify", {"input": []}, 2, "input"),
        ("/v1/classify", {"input": "good", "stream": True}, 2, "stream"),
        ("/v1/pooling", {"input": "good", "use_activation": False}, 0, "use_activation"),
        ("/v1/score", {"text_1": "good", "text_2": "bad", "use_activation": False}, 0, "use_activation"),
    ],
)
async def test_what_a_model_cannot_do_is_refused(
    path: str, body: dict[str, Any], labels: int, place: str, tmp_path: Path
) -> None:
    names: dict[str, Any] = {"id2label": {str(index): f"L{index}" for index in range(labels)}} if labels else {}
    changed: dict[str, Any] = {"model": folder(tmp_path, **names)} if labels else {}
    async with answering(saying(0.0), words() if labels else None, **changed) as gateway:
        refused = await gateway.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, place)
        assert gateway.fake.requests == []


def test_scores_of_large_values() -> None:
    assert label_scores([-1000.0, 1000.0], "sigmoid") == [0, 1]
    assert label_scores([1000.0, -1000.0], "softmax") == [1, 0]
    assert label_scores([2.0], "none") == [2]
