"""Other engines beside ours on a GPU: fakes of them answer as they are asked, and missing ones are told by name."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.engine import Answers
from benchmarks.frame import Skipped
from benchmarks.peers.engines import Environment, running
from tools.gpu_check.serving import Prompts
from tools.gpu_check.stages.other_engines import OTHERS, Batch, check, measure
from tools.gpu_check.where import Figures, Where

FAKES = str(Path(__file__).parent / "engines")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines can be imported, here and in processes."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FAKES, os.environ.get("PYTHONPATH", "")]))


def test_engines_that_cannot_be_imported_are_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHERS:
        monkeypatch.setitem(sys.modules, name, None)
    figures: Figures = {}
    check(Where("staged", True, tmp_path, 60.0), figures)
    assert figures == {
        "vLLM": "skipped: vLLM cannot be imported",
        "SGLang": "skipped: SGLang cannot be imported",
    }


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("name", "version"), [("vllm", "vLLM 1.2"), ("sglang", "SGLang 3.4")])
def test_an_engine_answers_all_prompts_with_so_many_tokens(name: str, version: str, tmp_path: Path) -> None:
    python = Environment(tmp_path, print, packages={}, installed={}).python(name)
    (tmp_path / "config.json").touch()
    with running(name, python, tmp_path, 1) as peer:
        assert peer.version == version
        for tokens in (1, 5):
            seconds, answers = peer.answer([[1, 2], [3, 4], [5, 6]], tokens)
            assert answers == [[7] * tokens] * 3
            assert seconds > 0.0
    with pytest.raises(Skipped, match="ended with 1"), running(name, python, tmp_path / "nothing", 1):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_for_cpus_is_not_measured_as_one_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    python = Path(sys.executable)
    with pytest.raises(Skipped, match="ended with 1"), running("vllm", python, tmp_path, 1, device="cuda"):
        pass


def test_a_time_per_token_is_that_behind_the_first_one() -> None:
    """The first round, which may compile, is left out."""
    asked: list[tuple[int, int, int]] = []

    def ask(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, Answers]:
        asked.append((len(prompts), len(prompts[0]), tokens))
        late = 9.0 if len(asked) <= 2 else 0.0
        return late + 0.1 * len(prompts) + 0.01 * (tokens - 1), [[7] * tokens for _ in prompts]

    figures: Figures = {}
    answers = measure("vLLM", ask, (Batch(2, 30, 5),), 2, Prompts(1000), figures)
    assert asked == [(2, 30, 1), (2, 30, 5)] * 3
    assert answers == [[7] * 5] * 6
    assert figures == {"vLLM, batch 2 of 30 tokens: TTFT, ms": 200.0, "vLLM, batch 2 of 30 tokens: TPOT, ms": 10.0}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fakes")
def test_all_are_measured_on_one_model(tmp_path: Path) -> None:
    figures: Figures = {}
    check(Where("staged", True, tmp_path, 240.0), figures)
    assert (figures["vLLM"], figures["SGLang"]) == ("vLLM 1.2", "SGLang 3.4")
    for name in ("Moonpool", "vLLM", "SGLang"):
        assert sum(f"{name}, batch" in figure for figure in figures) == 4
