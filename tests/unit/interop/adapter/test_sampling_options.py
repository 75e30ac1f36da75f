"""Every sampling option reaches an engine of another make, is carried out here, or is refused by name."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.interop.adapter import sglang, vllm
from moonpool.interop.adapter.base import HANDLED, EnginePrompt, refused_options
from tests.unit.base.test_sampling_params import EVERY_FIELD_SET

Body = Callable[[EnginePrompt], dict[str, Any]]
ENGINES: dict[str, tuple[Body, tuple[str, ...]]] = {
    "vllm": (vllm.request_body, tuple(vllm.PASSED)),
    "sglang": (sglang.request_body, (*sglang.PASSED, *sglang.PASSED_BESIDE)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterParams(SamplingParams):
    """What a later version has."""

    top_n_sigma: float = 0.0


def body(engine: str, params: SamplingParams) -> dict[str, Any]:
    prompt = EnginePrompt("id", array("i", [1, 2]), params, 7, 8, 0, (3,), "", 0, -1)
    return {name: value for name, value in ENGINES[engine][0](prompt).items() if name != "rid"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", [option.name for option in fields(SamplingParams)])
def test_an_option_is_passed_on_or_carried_out_here_or_refused(engine: str, option: str) -> None:
    passed = ENGINES[engine][1]
    ways = [option in passed, option in HANDLED, option in refused_options(passed)]
    assert ways.count(True) == 1
    changed = replace(SamplingParams(), **{option: getattr(EVERY_FIELD_SET, option)})
    assert (body(engine, changed) != body(engine, SamplingParams())) == (option in passed)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_option_that_no_table_has_is_refused(engine: str) -> None:
    assert "top_n_sigma" in refused_options(ENGINES[engine][1], LaterParams)


def test_options_that_are_given_are_those_that_differ() -> None:
    assert SamplingParams().given == ()
    assert SamplingParams(temperature=1.0, stop=(), n=1).given == ()
    assert LaterParams(top_n_sigma=2.0, top_k=3).given == ("top_k", "top_n_sigma")
    assert set(EVERY_FIELD_SET.given) == {option.name for option in fields(SamplingParams)}
