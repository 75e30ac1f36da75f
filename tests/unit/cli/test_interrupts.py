"""Ctrl-C of commands that start a stack: a word at once, no cleaning up that is broken off, no second wait."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from moonpool.cli.interrupts import STOPPING, STOPPING_NOW, answered_interrupts


class Service:
    """Takes signals as a service's process does."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C is as for a command in the foreground; tests may run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_start_is_broken_off_and_its_cleaning_up_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service()

    def start() -> None:
        with answered_interrupts() as interrupts:
            interrupts.services = {"prefill-0": service}  # type: ignore[dict-item]
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                assert capsys.readouterr().err == f"{STOPPING}\n"
                assert service.signals == []
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert capsys.readouterr().err == f"{STOPPING_NOW}\n"
    assert service.signals == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_body_has_its_own_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    """A chat takes Ctrl-C for its answers; one that ends the body is answered, and the stack then ends unbroken."""

    def chat() -> None:
        with answered_interrupts() as interrupts:
            try:
                with interrupts.left_to_body():
                    with pytest.raises(KeyboardInterrupt):
                        signal.raise_signal(signal.SIGINT)
                    assert capsys.readouterr().err == ""
                    signal.raise_signal(signal.SIGINT)
            finally:
                assert capsys.readouterr().err == f"{STOPPING}\n"
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        chat()
    assert capsys.readouterr().err == f"{STOPPING_NOW}\n"


def test_behind_a_body_that_ended_by_itself_nothing_is_broken_off(capsys: pytest.CaptureFixture[str]) -> None:
    with answered_interrupts() as interrupts:
        with interrupts.left_to_body():
            pass
        signal.raise_signal(signal.SIGINT)
        assert capsys.readouterr().err == f"{STOPPING_NOW}\n"


def test_a_job_in_the_background_goes_on() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with answered_interrupts() as interrupts, interrupts.left_to_body():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_have_no_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def start() -> None:
        with answered_interrupts() as interrupts, interrupts.left_to_body():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == [before]


STORM = """
import signal
from moonpool.cli.interrupts import StopFlag
flags = []
signal.signal(signal.SIGALRM, lambda *_: flags[-1].set())
signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
for _ in range(3000):
    flags.append(StopFlag())
    while not flags[-1].wait(1e-5):
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_flag_that_is_set_at_any_point_of_a_wait() -> None:
    """A signal comes at each point of `wait`: with an event's lock, the process would wait for itself for ever."""
    subprocess.run([sys.executable, "-c", STORM], check=True, timeout=120)
