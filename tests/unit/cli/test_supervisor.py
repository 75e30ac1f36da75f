import pytest

from moonpool.base.errors import Unavailable
from moonpool.cli.supervisor import MAX_FAILURES, STABLE_S, Supervisor


class Process:
    """A service that ends when a test says so."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.address = ""

    def log_tail(self) -> str:
        return "  decode-0| no such checkpoint"


class World:
    """Two services, a clock, and what the supervisor told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.services = {name: Process() for name in ("conductor", "decode-0")}
        self.ended: list[tuple[str, int, float]] = []
        self.ready: list[str] = []
        self.restarted: list[tuple[str, float]] = []
        self.supervisor = Supervisor(
            self.services, self.restart, lambda *end: self.ended.append(end), self.ready.append, lambda: self.now
        )

    def restart(self, name: str) -> None:
        self.services[name] = Process()
        self.restarted.append((name, self.now))

    def end(self, name: str, status: int = -9) -> None:
        self.services[name].returncode = status
        self.supervisor.look()

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.supervisor.look()


def test_a_service_that_ends_is_restarted_after_a_pause_and_reported_when_ready() -> None:
    world = World()
    world.supervisor.look()
    world.end("decode-0")
    assert world.ended == [("decode-0", -9, 0.5)]
    world.pass_s(0.4)
    assert world.restarted == []
    world.pass_s(0.1)
    assert world.restarted == [("decode-0", 100.5)]
    world.pass_s(1.0)
    assert world.ready == []
    world.services["decode-0"].address = "127.0.0.1:7"
    world.pass_s(1.0)
    world.pass_s(1.0)
    assert world.ready == ["decode-0"]
    assert len(world.ended) == 1


def test_pauses_double_and_a_service_that_keeps_failing_is_given_up_with_its_log() -> None:
    world = World()
    for pause_s in (0.5, 1.0, 2.0, 4.0)[: MAX_FAILURES - 1]:
        world.end("decode-0", 2)
        assert world.ended[-1] == ("decode-0", 2, pause_s)
        world.pass_s(pause_s)
    assert len(world.restarted) == MAX_FAILURES - 1
    with pytest.raises(Unavailable, match=rf"decode-0 ended {MAX_FAILURES} times in a row.*status 2") as caught:
        world.end("decode-0", 2)
    assert "no such checkpoint" in str(caught.value)


def test_a_service_that_ran_for_long_starts_with_short_pauses_again() -> None:
    world = World()
    for _ in range(3 * MAX_FAILURES):
        world.end("decode-0")
        assert world.ended[-1][2] == 0.5
        world.pass_s(0.5)
        world.pass_s(STABLE_S)


def test_failures_of_one_service_do_not_count_for_another() -> None:
    world = World()
    world.end("decode-0")
    world.end("conductor")
    assert [pause_s for _, _, pause_s in world.ended] == [0.5, 0.5]
