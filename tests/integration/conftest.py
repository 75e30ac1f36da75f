"""What the integration tests share: a random checkpoint, and one default stack that serves it."""

import dataclasses
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pytest

from moonpool.cli.check import read_gauges, wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.model.create import create
from tests.integration.reference import Reference

if TYPE_CHECKING:
    from tests.integration.raw import Stack

SEED = 20_26
BLOCK = 16
REST_TIMEOUT_S = 20.0


@pytest.fixture(scope="session", autouse=True)
def running_stacks() -> Iterator[list[LocalStack]]:
    """Every stack that runs now. None is stopped after a success before everything reserved has come back."""
    stacks: list[LocalStack] = []
    start, leave = LocalStack.start, LocalStack.__exit__

    def noting_start(self: LocalStack, timeout_s: float = 180.0) -> str:
        address = start(self, timeout_s)
        stacks.append(self)
        return address

    def checking_exit(
        self: LocalStack, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self in stacks:
                stacks.remove(self)
                if kind is None:
                    check_at_rest(self)
        finally:
            leave(self, kind, error, trace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStack, "start", noting_start)
        patch.setattr(LocalStack, "__exit__", checking_exit)
        yield stacks


@pytest.fixture(autouse=True)
def everything_comes_back(running_stacks: list[LocalStack]) -> Iterator[None]:
    """Every test ends with the check, also those that share a stack with others."""
    yield
    for stack in running_stacks:
        check_at_rest(stack)


def check_at_rest(stack: LocalStack) -> None:
    """As `moonpool check`; a stack that the test has stopped itself has nothing left to say."""
    if stack.services:
        wait_at_rest(stack.address, REST_TIMEOUT_S)


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


@pytest.fixture
def plan(checkpoint: Path, tmp_path: Path) -> StackPlan:
    """A small stack, one instance of each kind."""
    return StackPlan(
        model=str(checkpoint),
        data_dir=tmp_path,
        dtype="float32",
        threads=1,
        block_tokens=BLOCK,
        kv_bytes=16 << 20,
        dram_bytes=16 << 20,
        spans_dir=tmp_path / "spans",
        extra={"prefill": ["--step-tokens", "64"]},
    )


@pytest.fixture
def stack(plan: StackPlan) -> Iterator[LocalStack]:
    """A running stack."""
    with LocalStack(plan) as running:
        yield running


def with_flags(plan: StackPlan, kind: str, *flags: str) -> StackPlan:
    """The plan with further flags for one kind of service."""
    return dataclasses.replace(plan, extra=plan.extra | {kind: [*plan.extra.get(kind, ()), *flags]})


def wait_busy(address: str, instance: str, timeout_s: float) -> None:
    """Waits until an instance holds something."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while all(reading.resting for reading in read_gauges(address) if reading.instance == instance):
        assert time.monotonic() < deadline, f"{instance} was never busy"
        pause.wait(0.005)


@pytest.fixture(scope="package")
def raw_stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Stack"]:
    """One stack for all tests that try to do it harm from outside; each of them ends with `check_unharmed`."""
    from tests.integration.raw import running

    with running(checkpoint, tmp_path_factory.mktemp("raw")) as stack:
        yield stack
