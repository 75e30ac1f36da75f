"""When instances change their roles: exact times, who goes, and that nothing swings."""

from dataclasses import replace

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.actions import Action, ChangeRole
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.events import Event, InstanceJoined, InstanceLeft, LoadReported, RoleChangeRequested
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.roles import CHANGE_S, SETTLE_S, RoleChange, RoleLimits
from tests.unit.conductor.core.world import LIMITS, SHAPE

SPEEDS = Speeds(prefill_per_token_s=0.001, decode_base_s=0.05, decode_per_sequence_s=0.001)
ROLES = RoleLimits(swap=True, ttft_s=10.0, tbt_s=0.1, hold_s=60.0, dwell_s=300.0)
BLOCKS = 1000
IDLE, BUSY = 0.0, 5.0
"""Seconds of queue at a prefill instance; with the second one its pressure is 1.5."""
FULL = 50
"""Sequences whose steps take as long as the limit: the pressure of a decode instance is 1."""


class World:
    """Prefill and decode instances whose loads a test sets; each reports once a second."""

    def __init__(self, prefills: int, decodes: int, roles: RoleLimits = ROLES, *, switches_role: bool = True) -> None:
        self.core = ConductorCore(LIMITS, ClusterView(), roles)
        self.now, self.switches_role, self.lives = 0.0, switches_role, 0
        self.loads: dict[str, LoadFacts] = {}
        self.changes: list[tuple[float, str, InstanceKind]] = []
        for number in range(prefills):
            self.join(f"p{number}", InstanceKind.PREFILL)
        for number in range(decodes):
            self.join(f"d{number}", InstanceKind.DECODE)

    def join(self, name: str, kind: InstanceKind) -> None:
        self.lives += 1
        load = LoadFacts(free_blocks=BLOCKS, drain_s=IDLE if kind is InstanceKind.PREFILL else None)
        self.loads[name] = load
        self.post(
            InstanceJoined(
                InstanceFacts(name, self.lives, kind, BLOCKS, SHAPE, SPEEDS, switches_role=self.switches_role)
            )
        )

    def leave(self, name: str) -> None:
        del self.loads[name]
        self.post(InstanceLeft(name, self.core.cluster.epoch(name)))

    def post(self, event: Event) -> None:
        out: list[Action] = []
        self.core.handle(self.now, event, out)
        for action in out:
            assert isinstance(action, ChangeRole)
            assert action.epoch == self.core.cluster.epoch(action.instance)
            self.changes.append((self.now, action.instance, action.kind))

    def queue(self, seconds: float) -> None:
        """All prefill instances have so much to do from now on."""
        for name, load in self.loads.items():
            if load.drain_s is not None:
                self.loads[name] = replace(load, drain_s=seconds, running=1 if seconds else 0)

    def run(self, sequences: int) -> None:
        """All decode instances run so many from now on."""
        for name, load in self.loads.items():
            if load.drain_s is None:
                self.loads[name] = replace(load, running=sequences)

    def wait(self, seconds: int) -> None:
        """Time goes on; everybody reports once a second."""
        for _ in range(seconds):
            self.now += 1.0
            for name, load in list(self.loads.items()):
                self.post(LoadReported(name, load))
        self.core.check_invariants()

    @property
    def pressures(self) -> tuple[float, float]:
        values = self.core.roles.pressures
        return values[InstanceKind.PREFILL].value, values[InstanceKind.DECODE].value


def test_pressure_is_work_as_a_share_of_what_can_be_done() -> None:
    world = World(1, 1)
    world.queue(BUSY)
    world.run(FULL)
    world.wait(600)
    assert world.pressures == pytest.approx((1.5, 1.0), rel=1e-3)
    world.queue(IDLE)
    world.run(25)  # a third of a step of 75 ms is theirs, half of one of 100 ms would be
    world.wait(600)
    assert world.pressures == pytest.approx((0.0, 2 / 3), abs=1e-3)


def test_a_decode_instance_helps_prefill_when_that_has_lasted() -> None:
    world = World(2, 4)
    world.wait(10)
    world.queue(BUSY)
    world.wait(62)
    assert world.changes == []
    world.wait(60)
    [(when, name, kind)] = world.changes
    assert (name, kind) == ("d0", InstanceKind.PREFILL)
    # with a second between reports the running mean of 30 s passes one half after 14 s
    assert when == 10 + 14 + 60


def test_the_one_with_least_to_do_goes() -> None:
    world = World(2, 3)
    world.loads["d0"] = replace(world.loads["d0"], running=5)
    world.loads["d1"] = replace(world.loads["d1"], running=2)
    world.loads["d2"] = replace(world.loads["d2"], running=3)
    world.queue(BUSY)
    world.wait(120)
    assert [name for _, name, _ in world.changes] == ["d1"]


@pytest.mark.parametrize(
    ("prefills", "decodes", "sequences", "why"),
    [
        (2, 1, 0, "somebody must decode"),
        (2, 2, FULL, "decode is full itself"),
        (2, 2, 40, "with one less it would be"),
    ],
)
def test_a_pool_that_cannot_spare_one_gives_none(prefills: int, decodes: int, sequences: int, why: str) -> None:
    world = World(prefills, decodes)
    world.queue(BUSY)
    world.run(sequences)
    world.wait(600)
    assert world.changes == [], why


def test_a_pool_that_is_hardly_used_gets_nobody() -> None:
    world = World(4, 4)
    world.run(10)  # 0.33
    world.wait(600)
    assert world.changes == []


def test_nobody_follows_before_the_change_is_over_and_who_has_changed_stays() -> None:
    world = World(2, 4)
    world.queue(BUSY)
    world.wait(100)
    assert len(world.changes) == 1
    world.leave("d0")
    world.queue(IDLE)
    world.run(FULL)
    world.wait(60)
    assert len(world.changes) == 1
    world.join("a9", InstanceKind.PREFILL)  # by its name it would be the next one
    world.queue(IDLE)
    world.run(FULL)
    world.wait(int(ROLES.dwell_s))
    assert [(name, kind) for _, name, kind in world.changes[1:2]] == [("p0", InstanceKind.DECODE)]
    assert "a9" not in {name for _, name, _ in world.changes}


def test_a_change_that_does_not_end_is_given_up() -> None:
    world = World(2, 4)
    world.queue(BUSY)
    world.wait(100)
    [(first, _, _)] = world.changes
    world.wait(int(CHANGE_S) + 100)
    assert [when for when, _, _ in world.changes[1:]] == [first + CHANGE_S]


def test_a_steady_load_moves_nobody_twice() -> None:
    """Half of the prefill instances were too few; with one more it is enough, and it stays so."""
    world = World(2, 4)
    world.queue(BUSY)
    world.run(20)
    world.wait(100)
    [(_, name, _)] = world.changes
    world.leave(name)
    world.join("p9", InstanceKind.PREFILL)
    world.queue(3.0)
    world.run(28)
    world.wait(900)
    assert len(world.changes) == 1


def test_only_who_can_change_is_told_to() -> None:
    world = World(2, 4, switches_role=False)
    world.queue(BUSY)
    world.wait(600)
    assert world.changes == []


def test_by_default_roles_are_fixed_but_for_who_is_told() -> None:
    world = World(2, 4, RoleLimits())
    world.queue(BUSY)
    world.wait(600)
    assert world.changes == []
    world.post(RoleChangeRequested("d2"))
    world.post(RoleChangeRequested("p0"))
    world.post(RoleChangeRequested("nobody"))
    assert world.changes == [(600.0, "d2", InstanceKind.PREFILL), (600.0, "p0", InstanceKind.DECODE)]


def test_a_pool_that_needs_several_gets_them_one_after_the_other() -> None:
    world = World(2, 4)
    world.queue(BUSY)
    world.wait(100)
    world.leave("d0")
    world.join("p8", InstanceKind.PREFILL)
    world.queue(BUSY)
    joined = world.now
    world.wait(100)
    assert world.changes[1:] == [(joined + SETTLE_S, "d1", InstanceKind.PREFILL)]


@pytest.mark.parametrize(("in_place", "ended"), [(False, True), (True, False)])
def test_a_change_in_place_is_over_when_the_same_id_has_joined(in_place: bool, ended: bool) -> None:
    change = RoleChange("d0", InstanceKind.PREFILL, 0.0, in_place=in_place)
    assert change.is_ended_by(InstanceFacts("d0", 2, InstanceKind.PREFILL, BLOCKS, SHAPE, SPEEDS))
    assert change.is_ended_by(InstanceFacts("p9", 1, InstanceKind.PREFILL, BLOCKS, SHAPE, SPEEDS)) is ended
    assert not change.is_ended_by(InstanceFacts("d0", 2, InstanceKind.DECODE, BLOCKS, SHAPE, SPEEDS))
    assert (change.limit_s < CHANGE_S) is in_place


def draining(world: World, name: str) -> None:
    """An instance drains from now on, and nothing of this conductor has made it so."""
    world.loads[name] = replace(world.loads[name], draining=True)


def test_a_change_that_another_conductor_has_ordered_is_waited_for() -> None:
    world = World(2, 4)
    world.queue(BUSY)
    world.wait(50)
    draining(world, "d2")
    world.wait(60)
    assert world.changes == []
    world.leave("d2")
    world.wait(20)
    assert world.changes == []
    world.join("d2", InstanceKind.PREFILL)
    world.queue(BUSY)
    joined = world.now
    world.wait(100)
    assert world.changes == [(joined + SETTLE_S, "d0", InstanceKind.PREFILL)]


def test_one_that_hangs_in_its_drain_is_waited_for_once() -> None:
    world = World(2, 4)
    world.queue(BUSY)
    world.wait(50)
    draining(world, "d2")
    world.wait(int(3 * CHANGE_S))
    seen = 52.0  # pressures are looked at with the first report of a second, d2's of 51 is not the first
    assert [(when, name) for when, name, _ in world.changes] == [(seen + CHANGE_S, "d0"), (seen + 2 * CHANGE_S, "d0")]


def test_a_drain_of_one_that_cannot_change_is_not_waited_for() -> None:
    world = World(2, 3)
    world.switches_role = False
    world.join("d3", InstanceKind.DECODE)
    world.queue(BUSY)
    draining(world, "d3")
    world.wait(100)
    assert [name for _, name, _ in world.changes] == ["d0"]
