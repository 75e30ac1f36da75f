"""What the check's serving stages make of what they see: right answers pass, and each kind of fault is told."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.errors import MoonpoolError, Overloaded, Unavailable
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.telemetry.spans import Recorder
from moonpool.cli.stack import StackPlan
from moonpool.client import Timing, TokenEvent
from moonpool.engine.models.random_checkpoint import SHAPES
from tools.gpu_check.client_speeds import (
    LARGE_SIZES,
    NOT_TOLD,
    OF_STEPS,
    SIZES,
    TINY_SIZES,
    Sizes,
    parts_of_ttft,
    tell_gaps,
)
from tools.gpu_check.serving import (
    LARGE,
    SMALL,
    TINY,
    Answer,
    CheckedStack,
    Served,
    checkpoint,
    gaps,
    known_part,
    run_until,
    step_ends,
)
from tools.gpu_check.stages.load import ANSWER, Load
from tools.gpu_check.stages.two_stages import compare
from tools.gpu_check.where import CheckError, Figures, Where, run_check

LIMIT_S = 240.0
PROMPT, RIGHT = [20, 21, 22], list(range(100, 100 + ANSWER))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stages share."""
    return tmp_path_factory.mktemp("gpu-check")


class FakeStream:
    """An answer that comes token by token, or an error."""

    def __init__(self, tokens: Sequence[int], error: MoonpoolError | None, pause_s: float) -> None:
        self._tokens, self._error, self._pause_s = tokens, error, pause_s
        self.result = None
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        if self._error is not None:
            raise self._error
        for position, token in enumerate(self._tokens):
            await asyncio.sleep(self._pause_s)
            yield TokenEvent(position, (token,), "")

    async def aclose(self) -> None:
        self.closed = True


def loaded(
    tokens: Sequence[int] = RIGHT,
    error: Callable[[], MoonpoolError] | None = None,
    pause_s: float = 0.0,
    requests: int = 30,
) -> Load:
    """A load after so many requests, all answered by the same tokens or refused by the same error."""
    left = iter(range(requests))

    def stream(**arguments: Any) -> FakeStream:
        if next(left, None) is None:
            load.until = 0.0
        return FakeStream(tokens, error() if error is not None else None, pause_s)

    client: Any = SimpleNamespace(stream=stream)
    load = Load(client, [(PROMPT, RIGHT)], 512, 50, time.monotonic() + 60)
    asyncio.run(load.worker(0))
    return load


def test_right_answers_are_compared_and_nothing_is_wrong() -> None:
    load = loaded()
    assert not load.wrong
    assert load.counts["compared"] >= ANSWER
    assert load.counts["answered"] == len(load.outcomes) > 0


def test_a_wrong_token_is_told_with_the_right_ones() -> None:
    load = loaded([*RIGHT[:5], 7, *RIGHT[6:]])
    assert load.wrong
    assert "a prompt of 3 tokens" in load.wrong[0]
    assert str(RIGHT) in load.wrong[0]


def test_failed_requests_are_told_and_refused_ones_counted() -> None:
    load = loaded(error=lambda: Unavailable("prefill-0 is gone"))
    assert load.wrong[0] == "Unavailable: prefill-0 is gone"
    load = loaded(error=lambda: Overloaded("full", reason="room", retry_after_s=0.0))
    assert not load.wrong
    assert load.counts["refused"] > 0


def test_some_requests_are_cancelled_while_they_run() -> None:
    assert loaded(pause_s=0.02, requests=12).counts["cancelled"] > 0


def test_gaps_are_those_that_overlap_a_span() -> None:
    answer = Answer(sent=0.0)
    for moment, tokens in ((1.0, [1]), (1.1, [2]), (1.6, [3, 4]), (1.7, [5])):
        answer.came(tokens, moment)
    assert answer.ttft_ms == 1000.0
    assert gaps(answer.times, 1.2, 1.3) == [pytest.approx(0.5)]
    assert max(gaps(answer.times, 0.0, 9.0)) == pytest.approx(0.5)
    assert gaps(answer.times, 1.65, 9.0) == [pytest.approx(0.1)]
    assert (answer.tokens_between(1.1, 1.6), answer.tokens_between(0.0, 9.0)) == (2, 5)


def test_beside_the_gaps_of_clients_stand_those_of_recorded_steps(tmp_path: Path) -> None:
    spans = Recorder("decode-0", tmp_path / "decode-0.jsonl")
    for ended_ms in (1000, 1004, 1050, 1054):
        spans.add("decode.step", 10**6 * (ended_ms - 2), 10**6 * ended_ms, step=1, requests=["one"])
        spans.add("kv.receive", 0, 10**6 * (ended_ms + 1))
    spans.close()
    ends = step_ends(tmp_path / "decode-0.jsonl")
    assert ends == pytest.approx([1.0, 1.004, 1.05, 1.054])
    figures: Figures = {}
    tell_gaps(figures, "{} gap{} of all, ms", "", [0.005] * 98 + [0.05, 0.09])
    tell_gaps(figures, "{} gap{} of all, ms", OF_STEPS, gaps(ends, 1.001, 1.01))
    tell_gaps(figures, "{} gap{} of none, ms", OF_STEPS, gaps(ends, 2.0, 3.0))
    assert figures == {
        "longest gap of all, ms": 90.0,
        "p99 gap of all, ms": 50.0,
        "longest gap of steps of all, ms": 46.0,
        "p99 gap of steps of all, ms": 46.0,
    }


def test_a_time_to_the_first_token_is_told_in_parts() -> None:
    """Those that the conductor measured, and what is left for the way to the client."""
    answers = []
    for queue_s in (0.001, 0.002, 0.090):
        result: Any = SimpleNamespace(timing=Timing(ttft_s=0.1, queue_s=queue_s, prefill_s=0.08 - queue_s))
        answers.append(Answer(sent=1.0, times=[1.13], result=result))
    parts = "waiting for prefill 2.0, prefill 78.0, other services 20.0, client 30.0 ms"
    assert parts_of_ttft(answers) == parts


def answer_of(tokens: Sequence[int], gap: float = 2.0) -> Answer:
    """An answer whose tokens have a second best that lies so far below."""
    told = [TokenLogprobs(token, -0.1, 1, ((token, -0.1), (511, -0.1 - gap))) for token in tokens]
    result: Any = SimpleNamespace(token_ids=tokens, logprobs=told)
    return Answer(tokens=list(tokens), result=result)


def test_tokens_of_two_stages_that_differ_or_are_never_certain_are_noticed() -> None:
    figures: Figures = {}
    compare([PROMPT], [answer_of(RIGHT)], [answer_of(RIGHT)], figures)
    assert figures == {"tokens compared": ANSWER}
    with pytest.raises(CheckError, match=r"a prompt of 3 tokens: one gave \[100, .* two gave \[7"):
        compare([PROMPT], [answer_of(RIGHT)], [answer_of([7, *RIGHT[1:]])], figures)
    with pytest.raises(CheckError, match="only 0% of the tokens are certain"):
        compare([PROMPT], [answer_of(RIGHT, gap=0.001)], [answer_of(RIGHT)], figures)


@pytest.mark.parametrize(("served", "sizes"), [(SMALL, SIZES), (LARGE, LARGE_SIZES), (TINY, TINY_SIZES)])
def test_pools_hold_what_is_asked_for_at_once(served: Served, sizes: Sizes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[served.shape]))
    layout = kv_layout(load_config(tmp_path), served.dtype, DEFAULT_BLOCK_SIZE)
    room = served.pool_bytes // layout.block_bytes

    def blocks(tokens: int) -> int:
        return -(-tokens // DEFAULT_BLOCK_SIZE) + 1

    most = max(sizes.prompts)
    assert most + 64 <= served.longest
    assert 2 * blocks(most) <= room
    for batch in sizes.batches:
        assert batch * blocks(sizes.short + sizes.answer_of(batch)) <= room
    assert sizes.running * blocks(sizes.short + sizes.running_answer) + 2 * blocks(sizes.joining) <= room


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "name",
    [
        "models",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("serve_small", "two_stages", "two_ranks", "load")),
    ],
)
def test_a_stage_passes_on_staged(name: str, out: Path) -> None:
    """`serve_large` is `serve_small` with other sizes."""
    check = import_module(f"tools.gpu_check.stages.{name}").check
    result = run_check(name, check, Where("staged", True, out, LIMIT_S - 20.0))
    assert result["error"] is None
    assert result["figures"]
    assert NOT_TOLD not in result["figures"].values()  # type: ignore[attr-defined]


def test_an_answer_is_known_up_to_a_near_tie() -> None:
    told = [TokenLogprobs(9, -0.1, 1, ((9, -0.1), (8, gap - 0.1))) for gap in (-2.0, -1.0, -0.001, -3.0)]
    result: Any = SimpleNamespace(token_ids=[9, 9, 9, 9], logprobs=told)
    assert known_part(result) == [9, 9]


def test_work_that_takes_too_long_or_fails_in_a_task_ends_with_one_error() -> None:
    async def failing() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raising())

    async def raising() -> None:
        raise Unavailable("the decode instance is gone")

    with pytest.raises(CheckError, match="out of time: waiting for ever"):
        run_until(0.0, asyncio.sleep(60), lambda: "waiting for ever")
    with pytest.raises(Unavailable, match="decode instance is gone"):
        run_until(60.0, failing(), lambda: "")


def test_work_ends_when_the_frame_ends_the_stage() -> None:
    async def ended_meanwhile() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    def handler(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(CheckError, match="out of time: measuring"):
            run_until(60.0, ended_meanwhile(), lambda: "measuring")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_service_that_has_ended_or_had_to_be_killed_is_named(tmp_path: Path) -> None:
    stack = CheckedStack(StackPlan("model", tmp_path), 1.0)
    ended: Any = SimpleNamespace(id="decode-0", returncode=-11, log_tail=lambda: "  decode-0| CUDA error")
    stack.services["decode-0"] = ended
    with pytest.raises(CheckError, match=r"no tokens: decode-0 ended with status -11\n  decode-0\| CUDA error"):
        stack.expect_all_run("no tokens")
    stack.statuses = {"conductor": 0, "prefill-0": -9}
    with pytest.raises(CheckError, match="prefill-0 ended with status -9"):
        stack.expect_ended_in_order()


def test_a_start_that_fails_is_told_with_the_end_of_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = StackPlan(str(tmp_path / "nothing"), tmp_path / "data")
    with pytest.raises(Unavailable, match=r"conductor ended with status 2(?s:.*)nothing"), CheckedStack(plan, 60.0):
        pass
    assert "conductor| " in capfd.readouterr().err


def test_a_checkpoint_is_created_once(tmp_path: Path) -> None:
    where, figures = Where("staged", True, tmp_path, 60.0), dict[str, Any]()
    served = Served("tiny-llama", "float32", 300, 1, 1)
    folder = checkpoint(where, served, figures)
    assert "create tiny-llama-float32, s" in figures
    again: Figures = {}
    assert checkpoint(where, served, again) == folder
    assert not again
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-float32"]
