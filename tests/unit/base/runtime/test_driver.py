import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import Internal
from moonpool.base.runtime.driver import Driver
from moonpool.base.runtime.journal import JournalWriter, journal_files, read_journal, rerun
from moonpool.base.scheduling.state_machine import IoEnded, Tick
from tests.unit.fakes.counter_core import Add, Counter, Said, Start

OURS = ("tests.unit.fakes.counter_core", __name__)


class TwoSayings(Counter):
    """Says a number and its double."""

    def handle(self, now: float, event: Add | IoEnded[int] | Tick, out: list[Said | Start]) -> None:
        if isinstance(event, Add):
            out += [Said(event.number), Said(2 * event.number)]


class Shell:
    """Performs actions by noting them; ends I/O at once when asked to."""

    def __init__(self, *, ends_at_once: bool = False, journal: JournalWriter | None = None) -> None:
        self.now = 100.0
        self.action_s = 0.0  # that an action takes by our clock
        self.done: list[Said | Start] = []
        self.said = asyncio.Event()
        self._ends_at_once = ends_at_once
        self.core = Counter()
        self.driver = Driver(self.core, self._perform, clock=lambda: self.now, journal=journal)

    def _perform(self, action: Said | Start) -> None:
        self.done.append(action)
        self.now += self.action_s
        if isinstance(action, Said):
            self.said.set()
        elif self._ends_at_once:
            self.driver.post(IoEnded(action.io, self.core.outstanding.get(action.io) or 0))


async def test_actions_are_done_before_post_returns() -> None:
    shell = Shell()
    shell.driver.post(Add(2))
    assert shell.done == [Start(1)]
    shell.driver.close()


async def test_what_an_action_posts_is_handled_after_it_and_before_post_returns() -> None:
    shell = Shell(ends_at_once=True)
    shell.driver.post(Add(2))
    assert shell.core.ended == [1]
    shell.driver.close()


async def test_the_core_is_ticked_when_it_is_due() -> None:
    shell = Shell()
    shell.driver.post(Add(2))
    assert shell.core.due() == 101.0
    shell.now, shell.action_s = 101.0, 2.0
    shell.driver.post(Add(3))  # arms the timer anew: it is over already, so the tick comes in the loop's next turn
    assert shell.core.due() == 102.0
    await asyncio.wait_for(shell.said.wait(), 60)
    assert shell.done[-1] == Said(5)
    assert shell.core.due() is None
    shell.driver.close()


async def test_time_never_goes_back() -> None:
    shell = Shell()
    shell.driver.post(Add(1))
    shell.now = 50.0
    shell.driver.post(Add(1))
    assert shell.core.due() == 101.0
    shell.driver.close()


async def test_a_flood_of_events_lets_other_tasks_run() -> None:
    core = Counter()
    clock = iter(range(1_000))

    def flood(action: Said | Start) -> None:
        if core.total < 5:
            driver.post(Add(1))

    driver = Driver(core, flood, clock=lambda: float(next(clock)))
    driver.post(Add(1))
    assert core.total == 1, "each event takes longer than a turn by this clock"
    turns = 0
    while core.total < 5:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 4
    driver.close()


async def test_settling_handles_what_waits_at_once() -> None:
    """Also what was put off to the loop's next turn; within an action it does nothing."""
    core = Counter()
    clock = iter(range(1_000))

    def flood(action: Said | Start) -> None:
        driver.settle()
        if core.total < 5:
            driver.post(Add(1))

    driver = Driver(core, flood, clock=lambda: float(next(clock)))
    driver.post(Add(1))
    assert core.total == 1
    driver.settle()
    assert core.total == 5
    driver.close()


async def test_an_action_that_fails_costs_neither_the_others_nor_what_was_posted() -> None:
    """The first of two actions posts an event and fails."""
    core = TwoSayings()
    done: list[Said | Start] = []

    def perform(action: Said | Start) -> None:
        done.append(action)
        if action == Said(1):
            driver.post(Add(5))
            raise ValueError("broken")

    driver = Driver(core, perform)
    with pytest.raises(ValueError, match="broken"):
        driver.post(Add(1))
    assert done == [Said(1), Said(2)]
    await asyncio.sleep(0)
    assert done == [Said(1), Said(2), Said(5), Said(10)]
    driver.close()


class Broken(Counter):
    """Fails at an odd number, and at each tick."""

    def handle(self, now: float, event: Add | IoEnded[int] | Tick, out: list[Said | Start]) -> None:
        if isinstance(event, Tick) or (isinstance(event, Add) and event.number % 2):
            raise ValueError("broken")
        super().handle(now, event, out)


class Late(Broken):
    """Is due already, always."""

    def due(self) -> float | None:
        return 0.0


async def failed(driver: Driver[Any, Said | Start], core: Counter) -> None:
    """The driver fails with the core's defect as the cause, and its core gets nothing more."""
    with pytest.raises(Internal, match="broken") as failure:
        await asyncio.wait_for(driver.failure(), 60)
    assert isinstance(failure.value.__cause__, ValueError)
    total = core.total
    driver.post(Add(2))
    driver.tell(Add(2))
    assert core.total == total


async def test_whoever_posts_hears_of_a_defect_and_the_core_goes_on() -> None:
    core, done = Broken(), list[Said | Start]()
    driver = Driver(core, done.append)
    with pytest.raises(ValueError, match="broken"):
        driver.post(Add(1))
    driver.post(Add(2))
    assert done == [Start(1)]
    driver.close()


async def test_a_defect_of_which_nobody_hears_fails_the_driver() -> None:
    core, done = Broken(), list[Said | Start]()
    driver = Driver(core, done.append)
    driver.tell(Add(1))
    await failed(driver, core)


async def test_so_does_one_that_an_action_meets() -> None:
    def perform(action: Said | Start) -> None:
        raise ValueError("broken")

    core = Counter()
    driver = Driver(core, perform)
    driver.tell(Add(2))
    await failed(driver, core)


async def test_so_does_one_of_a_tick() -> None:
    core, done = Late(), list[Said | Start]()
    driver = Driver(core, done.append)
    driver.post(Add(2))
    assert done == [Start(1)]
    await failed(driver, core)


async def test_so_does_one_of_what_was_put_off() -> None:
    clock, numbers = iter(range(1_000)), iter([2, 1])

    def perform(action: Said | Start) -> None:
        if number := next(numbers, 0):
            driver.post(Add(number))

    core = Broken()
    driver = Driver(core, perform, clock=lambda: float(next(clock)))
    driver.post(Add(2))  # each event takes longer than a turn by this clock
    await failed(driver, core)


class Halfway(Counter):
    """Fails at an odd number when it has begun I/O."""

    def handle(self, now: float, event: Add | IoEnded[int] | Tick, out: list[Said | Start]) -> None:
        super().handle(now, event, out)
        if isinstance(event, Add) and event.number % 2:
            raise ValueError("broken")


async def test_what_a_core_has_begun_before_it_failed_is_done(tmp_path: Path) -> None:
    """Else its I/O would never end. The journal has the event, so that a rerun meets the defect."""
    core, done = Halfway(), list[Said | Start]()
    driver = Driver(core, done.append, journal=JournalWriter(tmp_path, "counter", 1 << 20))
    with pytest.raises(ValueError, match="broken"):
        driver.post(Add(1))
    assert done == [Start(1)]
    driver.close()
    _, entries = read_journal(tmp_path / "counter.0", OURS)
    assert [entry.event for entry in entries] == [Add(1)]


def behind(core: Counter, *numbers: int) -> Driver[Any, Said | Start]:
    """A driver in which a number was handled, and some wait for the loop's next turns."""
    clock, waiting = iter(range(1_000)), list(numbers)

    def perform(action: Said | Start) -> None:
        while waiting:
            driver.post(Add(waiting.pop(0)))

    driver = Driver(core, perform, clock=lambda: float(next(clock)))
    driver.post(Add(2))  # each event takes longer than a turn by this clock
    assert core.total == 2
    return driver


async def test_whoever_asks_hears_of_its_own_event_also_behind_others() -> None:
    core = Broken()
    driver = behind(core, 4)
    with pytest.raises(ValueError, match="broken"):
        driver.ask(Add(1))
    assert core.total == 6
    driver.ask(Add(2))
    assert core.total == 8
    driver.close()


async def test_whoever_asks_does_not_hear_of_others_whose_defect_fails_the_driver() -> None:
    core = Broken()
    driver = behind(core, 1, 4)
    driver.ask(Add(2))
    assert core.total == 2
    await failed(driver, core)


async def test_a_journal_that_cannot_be_written_ends_and_the_core_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    shell = Shell(ends_at_once=True, journal=JournalWriter(folder, "counter", 0))  # a new file for each event
    shell.driver.post(Add(1))
    shutil.rmtree(folder)
    shell.driver.post(Add(2))
    assert shell.core.ended == [1, 2]
    assert not folder.exists()
    shell.driver.close()


async def test_a_journal_reruns_to_the_same_actions_and_the_same_state(tmp_path: Path) -> None:
    shell = Shell(ends_at_once=True, journal=JournalWriter(tmp_path, "counter", 1 << 20))
    for number in range(20):
        shell.now += 0.7
        shell.driver.post(Add(number))
    shell.driver.close()
    [file] = journal_files(tmp_path)
    result = rerun(file, check=True, modules=OURS)
    assert result.events == 40
    assert result.difference is None
    assert result.core.digest() == shell.core.digest()


async def test_a_journal_is_bounded_and_each_half_reruns_alone(tmp_path: Path) -> None:
    shell = Shell(ends_at_once=True, journal=JournalWriter(tmp_path, "counter", 4096))
    for number in range(500):
        shell.driver.post(Add(number))
    shell.driver.close()
    files = journal_files(tmp_path)
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) < 12_000, "half of the bound each, and two snapshots"
    results = [rerun(file, modules=OURS) for file in files]
    assert [result.difference for result in results] == [None, None]
    assert results[1].core.digest() == shell.core.digest()
    assert read_journal(files[1], OURS)[0].digest() == results[0].core.digest(), "one begins where the other ends"
