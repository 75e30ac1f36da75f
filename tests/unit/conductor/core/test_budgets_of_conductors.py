"""Budgets and shares over several conductors: what the core of one of them does with what instances pass on."""

from dataclasses import replace
from pathlib import Path

from moonpool.base.runtime.journal import JournalWriter, journal_files, rerun
from moonpool.conductor.core.actions import Action, CallReserve, FailRequest
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.events import Event, InstanceJoined, LoadReported, RequestArrived
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.memory_queue import YIELD_S
from moonpool.conductor.core.request_spec import RequestSpec, SloLimits
from moonpool.conductor.core.tenant_activity import ConductorActivity, TellActivity, TenantActivity, TenantBudget

from .world import LIMITS, NO_ROOM, SHAPE, SPEEDS, World

OTHER = "conductor-1"


def world(budget: TenantBudget, **how: int) -> World:
    """A conductor with one budget for ann."""
    return World(1, 1, replace(LIMITS, budgets={"ann": budget}), **how)


def report(world: World, *rows: TenantActivity, free: int = 64) -> list[Action]:
    """The decode instance reports to two conductors, and passes on what the other one has told."""
    uses = (ConductorActivity(OTHER, 1, 0.0, rows),)
    return world.report("decode-0", free, conductors=2, activities=uses)


def refusals(world: World) -> list[str]:
    return [end.failure.reason for end in world.ends.values() if isinstance(end, FailRequest)]


def test_what_is_over_the_budget_is_refused_and_others_are_not() -> None:
    cluster = world(TenantBudget(requests=2))
    for _ in range(3):
        cluster.arrive(tenant="ann")
    cluster.arrive(tenant="bob")
    assert refusals(cluster) == ["request_budget"]
    [end] = [end for end in cluster.ends.values() if isinstance(end, FailRequest)]
    assert end.refused
    assert end.failure.retry_after_s == 30.0
    cluster.sleep(30.0)
    cluster.arrive(tenant="ann")
    assert refusals(cluster) == ["request_budget"]
    cluster.finish_all()


def test_answers_count_as_requests() -> None:
    cluster = world(TenantBudget(requests=4))
    cluster.arrive(tenant="ann", choices=4)
    cluster.arrive(tenant="ann")
    assert refusals(cluster) == ["request_budget"]


def test_prompts_and_answers_use_tokens() -> None:
    cluster = world(TenantBudget(tokens=50))
    _, start = cluster.streaming(9, prompt=40, answer=20, tenant="ann")  # prefill gives one token, decode nine
    cluster.arrive(tenant="ann")
    assert refusals(cluster) == ["token_budget"]
    cluster.more(start, 5)
    [told] = [action for action in report(cluster) if isinstance(action, TellActivity)]
    assert [(row.requests, row.tokens, row.running) for row in told.tenants] == [(1, 55, 1)]
    assert told.tenants[0].tokens_owed == 55.0


def test_a_resumed_request_is_neither_refused_nor_charged_again() -> None:
    cluster = World(1, 1, replace(LIMITS, budgets={"*": TenantBudget(requests=1, concurrent=1)}))
    cluster.arrive()
    cluster.resume(tokens=3)
    assert refusals(cluster) == []
    [told] = [action for action in report(cluster) if isinstance(action, TellActivity)]
    assert [(row.requests, row.running) for row in told.tenants] == [(1, 2)]


def test_what_is_used_at_another_conductor_is_refused_here() -> None:
    cluster = world(TenantBudget(requests=60, concurrent=10))
    report(cluster)
    report(cluster, TenantActivity("ann", 1, requests=60))
    cluster.arrive(tenant="ann")
    assert refusals(cluster) == ["request_budget"]
    cluster.sleep(4.0)
    report(cluster, TenantActivity("ann", 2, requests=60, running=10))
    cluster.arrive(tenant="ann")
    assert refusals(cluster)[1:] == ["concurrent_budget"]
    report(cluster, TenantActivity("ann", 3, requests=60, running=0))
    cluster.arrive(tenant="ann")
    assert len(refusals(cluster)) == 2


def test_an_ended_request_makes_place() -> None:
    cluster = world(TenantBudget(concurrent=1))
    number = cluster.arrive(tenant="ann")
    cluster.arrive(tenant="ann")
    assert refusals(cluster) == ["concurrent_budget"]
    cluster.sleep(600.0)
    assert number in cluster.ends
    cluster.arrive(tenant="ann")
    assert refusals(cluster).count("concurrent_budget") == 1


def waiting(world: World, tenant: str = "ann", count: int = 3) -> list[int]:
    """Requests of ten blocks that wait for memory; the instance is full."""
    report(world, free=0)
    numbers = [world.arrive(prompt=152, answer=8, tenant=tenant) for _ in range(count)]
    for call in world.open(CallReserve):
        world.end(call, NO_ROOM)
    assert len(world.core.scheduler.memory_queue) == count
    return numbers


def test_memory_is_left_to_a_tenant_that_is_behind_at_another_conductor() -> None:
    cluster = world(TenantBudget())
    waiting(cluster)
    served = TenantActivity("ann", 1, work_s=100.0, running=8)
    bob = TenantActivity("bob", 2, waiting=2, waiting_blocks=20, waiting_s=1.0)
    report(cluster, served, bob, free=0)
    report(cluster, free=20)
    assert cluster.open(CallReserve) == [], "bob's two requests take all"
    report(cluster, free=34)
    assert len(cluster.open(CallReserve)) == 1


def left_to_bob() -> tuple[World, TenantActivity]:
    """Ann's requests wait here, and memory for two is left to bob's, which wait at another conductor."""
    cluster = world(TenantBudget())
    waiting(cluster)
    bob = TenantActivity("bob", 2, waiting=2, waiting_blocks=20, waiting_s=1.0)
    report(cluster, TenantActivity("ann", 1, work_s=100.0), bob, free=0)
    report(cluster, free=20)
    return cluster, bob


def test_memory_that_others_do_not_take_is_not_left_to_them_for_long() -> None:
    cluster, _ = left_to_bob()
    cluster.sleep(YIELD_S / 2)
    report(cluster, free=20)
    assert cluster.open(CallReserve) == []
    cluster.sleep(YIELD_S / 2)
    report(cluster, free=20)
    assert len(cluster.open(CallReserve)) == 2


def test_the_time_for_others_begins_anew_when_memory_is_left_to_them_again() -> None:
    cluster, bob = left_to_bob()
    report(cluster, TenantActivity("bob", 3), free=0)  # bob has what he wanted
    cluster.sleep(YIELD_S)
    report(cluster, replace(bob, version=4), free=0)
    report(cluster, free=20)
    assert cluster.open(CallReserve) == []


def test_a_tenant_that_is_behind_itself_leaves_nothing() -> None:
    cluster = world(TenantBudget())
    waiting(cluster, tenant="bob")
    ann = TenantActivity("ann", 2, work_s=100.0, waiting=2, waiting_blocks=20, waiting_s=1.0)
    report(cluster, ann, free=0)
    report(cluster, free=20)
    assert len(cluster.open(CallReserve)) == 2


def test_others_are_told_who_waits_and_what_was_placed() -> None:
    cluster = world(TenantBudget())
    waiting(cluster, count=2)
    told = [action for action in report(cluster, free=0) if isinstance(action, TellActivity)]
    [ann] = told[-1].tenants
    assert (ann.running, ann.waiting, ann.waiting_blocks) == (2, 2, 20)
    assert ann.waiting_s > 0
    assert ann.work_s == 0
    report(cluster, free=64)
    for call in cluster.open(CallReserve):
        cluster.promise(call)
    told = [action for action in report(cluster) if isinstance(action, TellActivity)]
    [ann] = told[-1].tenants
    assert (ann.waiting, ann.waiting_blocks, ann.waiting_s) == (0, 0, 0.0)
    assert ann.work_s > 0
    assert ann.tokens == 2 * 152


def test_a_journal_reruns_what_came_from_other_conductors(tmp_path: Path) -> None:
    """With a snapshot in the middle of everything: the journal's files are small."""
    budgets = {"*": TenantBudget(requests=3, tokens=500, concurrent=5)}
    core = ConductorCore(replace(LIMITS, budgets=budgets), ClusterView())
    writer = JournalWriter(tmp_path, "conductor-0", 1 << 15)
    facts = [
        InstanceFacts(name, 1, kind, 64, SHAPE, SPEEDS)
        for name, kind in (("prefill-0", InstanceKind.PREFILL), ("decode-0", InstanceKind.DECODE))
    ]
    events: list[Event] = [InstanceJoined(fact) for fact in facts]
    for number in range(1, 40):
        row = TenantActivity("ann", number, requests=number, running=number % 4, waiting=1, waiting_blocks=9)
        uses = (ConductorActivity(OTHER, 1, 0.1, (row,)),)
        events.append(LoadReported("decode-0", LoadFacts(free_blocks=64, conductors=2, activities=uses)))
        spec = RequestSpec(number, f"r{number}", 40, 8, b"key", SloLimits(), number / 4, 600.0, tenant="ann")
        events.append(RequestArrived(spec, ()))
    told = refused = 0
    for at, event in enumerate(events):
        actions: list[Action] = []
        writer.before(core)
        core.handle(at / 8, event, actions)
        writer.record(at / 8, event, tuple(actions))
        told += sum(isinstance(action, TellActivity) for action in actions)
        refused += sum(isinstance(action, FailRequest) for action in actions)
    writer.close()
    assert told
    assert refused
    for path in journal_files(tmp_path):
        assert rerun(path).difference is None
