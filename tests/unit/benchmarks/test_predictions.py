"""The benchmark of predictions: load and errors."""

import itertools
import math

import pytest

from benchmarks.predictions import (
    EMULATED,
    REAL,
    Load,
    Pair,
    Requests,
    Round,
    again,
    distance,
    median_error,
    rows,
    twice,
)


@pytest.mark.parametrize("load", [REAL, EMULATED])
def test_equal_seeds_give_equal_requests_within_the_loads_bounds(load: Load) -> None:
    asked, same, other = (list(Requests(load, seed).take(200, 2.0)) for seed in (1, 1, 2))
    assert asked == same != other
    assert all(16 <= len(request.prompt) <= load.most_tokens for request in asked)
    assert all(load.answer_tokens[0] <= request.answer <= load.answer_tokens[1] for request in asked)
    assert asked[0].at == 0.0
    assert all(earlier.at < later.at for earlier, later in itertools.pairwise(asked))
    assert 200 / asked[-1].at == pytest.approx(2.0, rel=0.4)
    openings = [tuple(request.prompt[:16]) for request in asked]
    assert 0.1 < 1 - len(set(openings)) / len(openings) < 0.5, "some prompts begin with an earlier one"


def test_a_row_is_the_median_of_the_rounds_medians() -> None:
    def of(*errors: float) -> list[Pair]:
        return [Pair(1.0 + error, 1.0) for error in errors]

    noise, idle = {"TTFT": 0.05, "TPOT": 0.5}, {"TTFT": 0.01, "TPOT": 0.02}
    rounds = [
        Round({"TTFT": of(0.1, -0.3, 0.2), "TPOT": of(0.5)}, noise),
        Round({"TTFT": of(0.4), "TPOT": of(-0.1)}, noise),
    ]
    assert median_error(rounds[0].pairs["TTFT"]) == pytest.approx(0.2)
    ttft, noise_of_ttft, alone, tpot, _, _ = rows("real", {"light": rounds}, idle, 0.31)
    assert ttft.name == "real: TTFT, light: median error of the prediction"
    assert (noise_of_ttft.name, alone.name) == ("real: TTFT, light: noise", "real: TTFT, idle: noise")
    assert ttft.value == pytest.approx(30.0)
    assert (ttft.unit, ttft.limit_value) == ("%", 31.0)
    assert tpot.value == pytest.approx(30.0)
    assert ttft.spread == pytest.approx(20 / 30)
    assert (noise_of_ttft.value, alone.value) == pytest.approx((5.0, 1.0))
    assert [row.met for row in rows("real", {"light": rounds}, idle, 0.31)] == [True, None, None, True, None, None]
    assert [row.met for row in rows("real", {"light": rounds}, idle, 0.2)] == [False, None, None, False, None, None]


def test_a_load_that_is_sent_again_has_other_tokens_that_begin_alike_where_they_did() -> None:
    asked = list(Requests(REAL, 1).take(40, 2.0))
    same = again(asked)
    assert [(request.at, len(request.prompt), request.answer) for request in same] == [
        (request.at, len(request.prompt), request.answer) for request in asked
    ]
    assert not {tuple(request.prompt[:16]) for request in asked} & {tuple(request.prompt[:16]) for request in same}
    for first, second in itertools.combinations(range(40), 2):
        alike = asked[first].prompt[:16] == asked[second].prompt[:16]
        assert alike == (same[first].prompt[:16] == same[second].prompt[:16])
    alone = Requests(REAL, 1).alone(3)
    assert len({tuple(request.prompt) for request in alone}) == 3
    assert {(request.at, len(request.prompt), request.answer) for request in alone} == {
        (0.0, REAL.prompt_tokens, REAL.answer_tokens[1])
    }


def test_noise_is_what_equal_rounds_differ_by() -> None:
    def of(*measured: float) -> dict[str, list[Pair]]:
        return {"TTFT": [Pair(1.0, seconds) for seconds in measured], "TPOT": [Pair(1.0, 1.0)] * 3}

    found = twice(of(1.0, 2.0, 3.0), of(1.0, 2.0 * math.exp(math.sqrt(2) * 0.1), 1.0))
    assert found.noise == {"TTFT": pytest.approx(math.expm1(0.1)), "TPOT": 0.0}
    assert len(found.pairs["TTFT"]) == 6
    assert distance([1.0, 1.1, 0.7, 1.0, 1.2]) == pytest.approx(0.1)
