"""`/v1/embeddings`: inputs of every form, both encodings, usage, refusals."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.errors import InvalidRequest
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.serving.embedding_sizes import EmbeddingSizes, cut
from moonpool.v1 import conductor_pb2 as pb

from .fakes import MODEL, Answers, answering

VALUES = (0.6, -0.8)
PATH = "/v1/embeddings"


def script(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """One token; before it, the embedding if it is wanted. The prompt has three tokens."""
    placed, *rest = answer([1], prompt_tokens=3)
    values = pb.PromptEmbedding(values=struct.pack("<2f", *VALUES))
    return [placed, *([pb.GenerateResponse(embedding=values)] if request.sampling.embedding else []), *rest]


@pytest.mark.parametrize(("given", "count"), [("a text", 1), (["a", "b", "c"], 3), ([4, 5, 6], 1), ([[4, 5], [6]], 2)])
async def test_inputs(given: Any, count: int) -> None:
    async with answering(FakeConductor(script)) as gateway:
        body = (await gateway.http.post(PATH, json={"input": given, "encoding_format": "float"})).json()
        assert body["object"] == "list"
        assert body["model"] == MODEL
        assert [part["index"] for part in body["data"]] == list(range(count))
        assert [part["embedding"] for part in body["data"]] == [pytest.approx(VALUES)] * count
        assert body["usage"] == {"prompt_tokens": 3 * count, "total_tokens": 3 * count}
        assert [request.sampling.max_tokens for request in gateway.fake.requests] == [1] * count


async def test_base64_as_openais_client_reads_it() -> None:
    async with answering(FakeConductor(script)) as gateway:
        body = (await gateway.http.post(PATH, json={"input": "x", "encoding_format": "base64"})).json()
        assert struct.unpack("<2f", base64.b64decode(body["data"][0]["embedding"])) == pytest.approx(VALUES)
        parsed = openai.types.CreateEmbeddingResponse.model_validate(
            (await gateway.http.post(PATH, json={"input": "x"})).json()
        )
        assert parsed.data[0].embedding == pytest.approx(VALUES)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["x", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "normalize": False}, "normalize"),
    ],
)
async def test_wrong_fields_are_named(gateway: Answers, body: dict[str, Any], field: str) -> None:
    response = await gateway.http.post(PATH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert gateway.fake.requests == []


async def test_dimensions_keep_the_first_values_at_length_one(tmp_path: Path) -> None:
    folder = tmp_path / MODEL
    folder.mkdir()
    settings = json.loads((model_dir() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "is_matryoshka": True}))
    async with answering(FakeConductor(script), model=str(folder)) as gateway:
        for dimensions, expected in ((1, [1.0]), (2, VALUES), (3, VALUES)):
            for encoding in ("float", "base64"):
                asked = {"input": ["a", "b"], "dimensions": dimensions, "encoding_format": encoding}
                body = (await gateway.http.post(PATH, json=asked)).json()
                for part in body["data"]:
                    found = part["embedding"]
                    if encoding == "base64":
                        found = struct.unpack(f"<{len(expected)}f", base64.b64decode(found))
                    assert list(found) == pytest.approx(list(expected))
        for dimensions in (0, -1, 10**6):
            refused = await gateway.http.post(PATH, json={"input": "x", "dimensions": dimensions})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


def test_a_checkpoint_says_to_which_sizes_its_embeddings_are_cut(tmp_path: Path) -> None:
    plain = json.loads((model_dir() / "config.json").read_text())
    size = plain["hidden_size"]
    for more, which, expected in (
        ({}, "auto", EmbeddingSizes()),
        ({}, "any", EmbeddingSizes(size)),
        ({"is_matryoshka": True}, "auto", EmbeddingSizes(size)),
        ({"is_matryoshka": False}, "auto", EmbeddingSizes()),
        ({"matryoshka_dimensions": [4, 8]}, "auto", EmbeddingSizes(size, (4, 8))),
        ({"matryoshka_dimensions": [4, 8]}, "any", EmbeddingSizes(size)),
        ({"matryoshka_dimensions": [4, 8]}, "none", EmbeddingSizes()),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**plain, **more}))
        assert EmbeddingSizes.of(str(tmp_path), which) == expected  # type: ignore[arg-type]
    EmbeddingSizes(size, (4, 8)).check(4)
    with pytest.raises(InvalidRequest, match="one of 4, 8"):
        EmbeddingSizes(size, (4, 8)).check(5)
    assert EmbeddingSizes.of(str(tmp_path / "none"), "any") == EmbeddingSizes()
    assert list(cut([0.0, 0.0, 1.0], 2)) == [0.0, 0.0]
