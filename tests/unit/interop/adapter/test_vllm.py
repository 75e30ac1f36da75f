"""How vLLM is asked, and how its words are read."""

import base64
import hashlib
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.kv.media import MediaItem
from moonpool.base.sampling_params import SamplingParams
from moonpool.interop.adapter.base import EngineOutput, EnginePrompt
from moonpool.interop.adapter.engine_http import EngineHttp, endpoint_for
from moonpool.interop.adapter.vllm import VllmClient, read_chunk, read_samples, request_body
from tests.unit.interop.adapter.fake_vllm import FakeVllm, fake_vllm


def prompt(**changes: Any) -> EnginePrompt:
    params = changes.pop("params", SamplingParams(temperature=0.5, top_k=3))
    fields = {
        "request_id": "r/0", "token_ids": array("i", [1, 2]), "params": params, "seed": 2**64 - 1, "max_tokens": 7,
        "min_tokens": 2, "end_token_ids": (0, 9), "salt": "", "priority": 0, "rank": -1, **changes,
    }  # fmt: skip
    return EnginePrompt(**fields)


def test_the_ends_of_an_answer_are_told_and_vllm_adds_none() -> None:
    body = request_body(prompt())
    sampling = body["sampling_params"]
    assert (body["token_ids"], body["stream"]) == ([1, 2], True)
    assert (sampling["ignore_eos"], sampling["stop_token_ids"]) == (True, [0, 9])
    assert (sampling["max_tokens"], sampling["min_tokens"]) == (7, 2)
    assert (sampling["temperature"], sampling["top_k"]) == (0.5, 3)
    assert 0 <= sampling["seed"] < 2**63
    assert not {"cache_salt", "priority"} & body.keys()
    assert not {"logprobs", "logit_bias"} & sampling.keys()


def test_what_a_request_sets_is_passed_on() -> None:
    body = request_body(prompt(params=SamplingParams(logprobs=0, logit_bias={3: 1.5}), salt="s", priority=-4))
    assert (body["cache_salt"], body["priority"]) == ("s", -4)
    assert (body["sampling_params"]["logprobs"], body["sampling_params"]["logit_bias"]) == (0, {"3": 1.5})


def test_chunks_have_tokens_an_end_and_what_was_cached() -> None:
    def choice(**fields: object) -> dict[str, object]:
        return {"choices": [{"index": 0, "finish_reason": None, "token_ids": None, **fields}]}

    assert read_chunk(choice(token_ids=[5, 6])) == EngineOutput((5, 6))
    assert read_chunk(choice(token_ids=[7], finish_reason="stop")) == EngineOutput((7,), finish="stop")
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}}
    assert read_chunk(usage) == EngineOutput(cached_tokens=64)
    assert read_chunk({"choices": [], "usage": None}) is None
    with pytest.raises(Unavailable):
        read_chunk(choice(finish_reason="abort"))
    with pytest.raises(Unavailable):
        read_chunk({"error": {"message": "the engine died"}})


def test_the_most_likely_tokens_are_told_without_the_one_that_was_drawn() -> None:
    top = [{"token_id": 8, "logprob": -4.0, "rank": 9}, {"token_id": 1, "logprob": -0.5, "rank": 1}]
    top.append({"token_id": 2, "logprob": -1.0, "rank": 2})
    logprobs = {"content": [{"token_id": 8, "logprob": -4.0, "rank": 9, "top_logprobs": top}]}
    message = {"choices": [{"token_ids": [8], "finish_reason": None, "logprobs": logprobs}]}
    output = read_chunk(message, 2)
    assert output is not None
    assert output.logprobs is not None
    [row] = output.logprobs.of([8])
    assert (row.logprob, row.rank) == (-4.0, 9)
    assert row.top == ((1, -0.5), (2, -1.0))


def test_samples_are_read_with_their_labels() -> None:
    text = '# HELP x y\nstarted 1.5e+09\nvllm:running{engine="0",name="a b"} 2.0\nvllm:running{engine="1"} 3\n'
    assert read_samples(text) == {
        "started": [({}, 1.5e9)],
        "vllm:running": [({"engine": "0", "name": "a b"}, 2.0), ({"engine": "1"}, 3.0)],
    }


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://engine:5557"),
        ("tcp://0.0.0.0:5557", 2, "tcp://engine:5559"),
        ("tcp://10.0.0.1:5557", 1, "tcp://10.0.0.1:5558"),
        ("ipc:///run/events", 0, "ipc:///run/events"),
        ("", 0, ""),
    ],
)
def test_clients_connect_where_a_rank_binds(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_for(endpoint, rank, "engine") == expected


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[FakeVllm, VllmClient]]:
    async with fake_vllm(folder, "a", 1000) as engine:
        engine.pictures = {b"first": 5, b"second": 3}
        client = VllmClient(EngineHttp("vLLM", engine.url))
        assert (await client.describe()).pictures
        yield engine, client
        await client.aclose()


def picture(begin: int, end: int, content: bytes) -> MediaItem:
    return MediaItem(begin, end, hashlib.blake2b(content, digest_size=32).digest(), content)


async def test_pictures_are_features_of_the_render_endpoint_at_their_places_under_our_digests(tmp_path: Path) -> None:
    media = (picture(2, 7, b"first"), picture(9, 12, b"second"), picture(12, 17, b"first"))
    async with running(tmp_path) as (engine, client):
        for _ in range(2):  # of the second turn's, none is rendered again
            async for _output in client.generate(prompt(token_ids=array("i", [1] * 20), media=media)):
                pass
        assert engine.renders == 2
        for body in engine.requests:
            features = {name: values["image"] for name, values in body["features"].items()}
            assert features["mm_hashes"] == [item.digest.hex() for item in media]
            assert features["mm_placeholders"] == [
                {"offset": item.begin, "length": item.end - item.begin} for item in media
            ]
            assert [base64.b64decode(data) for data in features["kwargs_data"]] == [
                b"pixels of " + item.content for item in media
            ]


async def test_a_mask_of_the_tokens_with_rows_goes_on_if_it_has_the_marks_alone(tmp_path: Path) -> None:
    """As vLLM behind 0.32 tells it: pictures with other tokens between their rows, such as Mistral's ends of rows."""
    async with running(tmp_path) as (engine, client):
        engine.masks = {b"first": [True, True, False, True, False], b"second": [True, True, False]}
        tokens = array("i", [1, 9, 9, 7, 9, 8, 1, 9, 7, 9])
        async for _output in client.generate(prompt(token_ids=tokens, media=(picture(1, 6, b"first"),))):
            pass
        [body] = engine.requests
        [place] = body["features"]["mm_placeholders"]["image"]
        assert place == {"offset": 1, "length": 5, "is_embed": engine.masks[b"first"]}
        with pytest.raises(InvalidRequest, match="has rows at other tokens"):
            async for _output in client.generate(prompt(token_ids=tokens, media=(picture(7, 10, b"second"),))):
                pass


async def test_a_picture_with_other_tokens_than_the_models_rule_says_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, client):
        with pytest.raises(InvalidRequest, match=r"sequence\.media: vLLM makes 5 tokens of a picture, not 4"):
            async for _ in client.generate(prompt(media=(picture(0, 4, b"first"),))):
                pass
        with pytest.raises(InvalidRequest, match="between whose rows"):
            async for _ in client.generate(
                prompt(token_ids=array("i", [1, 1, 2, 1, 1]), media=(picture(0, 5, b"first"),))
            ):
                pass
        assert not engine.requests
