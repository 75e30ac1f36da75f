"""How vLLM is asked, and how its words are read."""

from array import array
from typing import Any

import pytest

from moonpool.base.errors import Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.interop.adapter.base import EngineOutput, EnginePrompt
from moonpool.interop.adapter.engine_http import endpoint_for
from moonpool.interop.adapter.vllm import read_chunk, read_samples, request_body


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
