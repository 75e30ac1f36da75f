"""The local stack of the integration tests: it does not pass as stopped before everything reserved has come back,
and its journals are rerun."""

import signal
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import ClassVar, TypeVar

from moonpool.base.fork_server import Launcher, execute
from moonpool.cli.check import read_gauges, wait_at_rest
from tests.journals import JournaledStack

REST_TIMEOUT_S = 60.0
TRIES = 3
"""Times that a test asks for what a busy machine may keep from happening: a load that waits long is given up, and the
rest computed; an answer may be whole before a service is killed."""
T = TypeVar("T")


class CheckedStack(JournaledStack):
    """A local stack that is checked when it is left without an error, and after each test while it runs."""

    running: ClassVar[list["CheckedStack"]] = []

    def start(self, silence_s: float = 180.0) -> str:
        address = super().start(silence_s)
        self.running.append(self)
        return address

    def check_at_rest(self) -> None:
        """As `moonpool check`; a stack that the test has stopped itself has nothing left to say."""
        if self.services:
            wait_at_rest(self.addresses, REST_TIMEOUT_S, self.plan.tls)

    def gauge(self, instance: str, name: str) -> float:
        """A gauge of one instance, or of all whose id begins so, added up."""
        readings = [
            read_gauge
            for read_gauge in read_gauges(self.address, self.plan.tls)
            if read_gauge.instance.startswith(instance) and read_gauge.name == name
        ]
        assert readings, f"{instance} has no gauge {name}"
        return sum(reading.value for reading in readings)

    def restart_all(self, names: Sequence[str], *, kill: bool = False, timeout_s: float = 180.0) -> None:
        """As `restart`, for several members at once."""
        old = [self.services[name] for name in names]
        for service in old:
            service.signal(signal.SIGKILL if kill else signal.SIGTERM)
        for service in old:
            service.wait(timeout_s)
        for service in [self.spawn_again(name) for name in names]:
            service.wait_ready(timeout_s)
        self.wait_joined(timeout_s)

    def ask_restarted(
        self, names: Sequence[str], ask: Callable[[], T], hit: Callable[[T], bool], *, kill: bool = False
    ) -> T:
        """The answer of engines that have forgotten all KV and how quick loads are, if need be of the last of `TRIES`.

        Args:
            names: engines that are restarted before each try.
            ask: the request.
            hit: whether an answer used what the kvstore has.
            kill: as in `restart`.
        """
        for _ in range(TRIES):
            self.check_at_rest()
            self.restart_all(names, kill=kill)
            answer = ask()
            if hit(answer):
                break
        return answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self in self.running:
                self.running.remove(self)
                if kind is None:
                    self.check_at_rest()
        finally:
            super().__exit__(kind, error, trace)


class Executed(CheckedStack):
    """A stack whose services, and so their engines, are executed as containers execute them; others are forked."""

    def launcher(self, service_id: str) -> Launcher:
        return execute
