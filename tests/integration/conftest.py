"""What the integration tests share: a random checkpoint, and one default stack that serves it."""

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.cli.check import read_gauges
from moonpool.cli.stack import StackPlan
from moonpool.engine.models.random_checkpoint import create
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack
from tests.journals import check_journals

SEED = 20_26
BLOCK = 16


@pytest.fixture(autouse=True)
def everything_comes_back() -> Iterator[None]:
    """Every test ends with the check, also those that share a stack with others."""
    yield
    for stack in CheckedStack.running:
        stack.check_at_rest()


@pytest.fixture(autouse=True)
def journals_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Services that a test starts itself, or lets a command start, keep journals, those of an id that starts again too.

    Stacks see to their own.
    """
    monkeypatch.setenv("MOONPOOL_JOURNAL_DIR", str(tmp_path / "journals" / "{pid}"))
    yield
    check_journals(tmp_path / "journals")


def tokens(count: int, seed: object, vocab_size: int = 256) -> list[int]:
    """Random ordinary token ids, the same for the same seed."""
    generator = random.Random(f"{SEED}/{seed}")
    return [generator.randrange(8, vocab_size) for _ in range(count)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, float32."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    create("tiny-llama", folder, seed=SEED, dtype="float32")
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    """The same checkpoint as `transformers` runs it."""
    return Reference(checkpoint)


def small_plan(checkpoint: Path, folder: Path) -> StackPlan:
    """A small stack, one instance of each kind. Prompts are computed at prefill, however quick decode would be."""
    return StackPlan(
        model=str(checkpoint),
        data_dir=folder,
        dtype="float32",
        threads=1,
        block_size=BLOCK,
        kv_cache_memory_bytes=16 << 20,
        dram_bytes=16 << 20,
        spans_dir=folder / "spans",
        extra={"prefill": ["--max-num-batched-tokens", "64"], "conductor": ["--set", "decode_prompt_tokens=0"]},
    )


@pytest.fixture
def plan(checkpoint: Path, tmp_path: Path) -> StackPlan:
    """See `small_plan`."""
    return small_plan(checkpoint, tmp_path)


def with_flags(plan: StackPlan, kind: str, *flags: str) -> StackPlan:
    """The plan with further flags for one kind of service."""
    return dataclasses.replace(plan, extra=dict(plan.extra) | {kind: [*plan.extra.get(kind, ()), *flags]})


def wait_busy(address: str, instance: str, timeout_s: float, over: Callable[[], bool] = lambda: False) -> bool:
    """Waits until an instance holds something; False: it was `over` before that was seen."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while all(reading.resting for reading in read_gauges(address) if reading.instance == instance):
        if over():
            return False
        assert time.monotonic() < deadline, f"{instance} was never busy"
        pause.wait(0.005)
    return True
