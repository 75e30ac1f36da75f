"""KV of expected and of waiting prompts: into memory, into the chosen instance, within a budget, and called off."""

import pytest

from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.conductor.core.actions import CallPrefill, CallReserve
from moonpool.conductor.core.events import ClientGone, CompletionReason, KeysChanged, PromptsAnnounced, SessionUpdated
from moonpool.conductor.core.in_flight_prefixes import REPORTS_AWAITED
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.retention import INSTANCE_LEAD_S, MEMORY_LEAD_S, TellSession

from .world import World

STORE = "kvstore-0"
KEYS = tuple(bytes([number]) * 32 for number in range(2))
OTHERS = tuple(bytes([number]) * 32 for number in range(9, 11))
RETURN_S = 60.0


def cluster(prefetch_share: float = 1.0) -> World:
    world = World(prefills=1, decodes=1, prefetch_share=prefetch_share)
    world.join_store(STORE)
    return world


def turn(world: World, keys: tuple[bytes, ...], name: str = "s") -> None:
    """A session's turn ends; the store has its KV, and no engine has."""
    world.arrive(keys=keys, session=SessionTurn(id=name, return_s=RETURN_S))
    world.promise(world.one(CallReserve))
    call = world.one(CallPrefill)
    world.first_token(call, CompletionReason.STOP)
    world.end(call)
    for _ in range(REPORTS_AWAITED):
        world.report("prefill-0", 64)


def stored(world: World, *keys: bytes, cold: tuple[bytes, ...] = ()) -> None:
    world.post(KeysChanged(STORE, 1, keys, (), True, True, cold))


def prefetched(world: World) -> list[tuple[bytes, ...]]:
    """Keys that the store was told to bring into memory."""
    return [order.prefetch for order in world.all(TellSession) if order.prefetch]


def test_blocks_come_into_the_chosen_instance_before_the_session_returns() -> None:
    world = cluster()
    turn(world, KEYS)
    stored(world, *KEYS, cold=KEYS[1:])
    world.sleep(RETURN_S - MEMORY_LEAD_S)
    assert (prefetched(world), world.all(ReplicatePrefix)) == ([KEYS], [])
    world.sleep(MEMORY_LEAD_S - INSTANCE_LEAD_S)
    assert world.all(ReplicatePrefix) == [ReplicatePrefix("prefill-0", KEYS, STORE, "")]
    world.sleep(RETURN_S)
    assert (len(prefetched(world)), len(world.all(ReplicatePrefix))) == (1, 1), "once"
    assert (world.core.scheduler.prefetch.to_memory, world.core.scheduler.prefetch.to_instances) == (1, 1)


@pytest.mark.parametrize("why", ["held there", "no budget", "the session is back"])
def test_nothing_is_fetched_that_is_not_needed(why: str) -> None:
    world = cluster(prefetch_share=0.0 if why == "no budget" else 1.0)
    turn(world, KEYS)
    stored(world, *KEYS)
    if why == "held there":
        world.holds("prefill-0", KEYS)
    elif why == "the session is back":
        world.arrive(keys=KEYS, session=SessionTurn(id="s"))
    world.sleep(RETURN_S)
    assert (prefetched(world), world.all(ReplicatePrefix)) == ([], [])


def test_a_link_takes_no_more_than_its_share() -> None:
    """Two sessions return at the same time: the second one's copy would take the link beyond its share."""
    world = cluster(prefetch_share=0.001)
    turn(world, KEYS)
    turn(world, OTHERS, "other")
    stored(world, *KEYS, *OTHERS)
    world.sleep(RETURN_S)
    assert [order.keys for order in world.all(ReplicatePrefix)] == [OTHERS], "of two at once the first by name"


def test_a_copy_is_called_off_if_the_session_ends_or_goes_elsewhere() -> None:
    world = cluster()
    turn(world, KEYS)
    stored(world, *KEYS)
    world.sleep(RETURN_S - INSTANCE_LEAD_S)
    assert len(world.all(ReplicatePrefix)) == 1
    world.post(SessionUpdated("", SessionTurn(id="s", last=True)))
    assert world.all(StopReplication) == [StopReplication("prefill-0", KEYS[-1])]

    turn(world, OTHERS, "other")
    stored(world, *KEYS, *OTHERS)
    world.sleep(RETURN_S - INSTANCE_LEAD_S)
    assert world.all(ReplicatePrefix)[-1].instance == "prefill-0"
    world.join_prefill("prefill-1")
    world.drain("prefill-0")
    world.arrive(keys=OTHERS, session=SessionTurn(id="other"))
    world.promise(world.one(CallReserve))
    assert world.one(CallPrefill).plan.prefill.id == "prefill-1"
    assert world.all(StopReplication)[1:] == [StopReplication("prefill-0", OTHERS[-1])]
    assert world.core.scheduler.prefetch.cancelled == 2


def test_a_copy_that_has_arrived_is_not_called_off() -> None:
    world = cluster()
    turn(world, KEYS)
    stored(world, *KEYS)
    world.sleep(RETURN_S - INSTANCE_LEAD_S)
    world.holds("prefill-0", KEYS)
    world.post(SessionUpdated("", SessionTurn(id="s", last=True)))
    assert world.all(StopReplication) == []


def test_announced_prompts_are_kept_and_fetched_once_however_many_share_a_prefix() -> None:
    world = cluster()
    stored(world, *KEYS, cold=KEYS)
    new = (b"x" * 32,)
    world.post(PromptsAnnounced("", ((*KEYS, b"a" * 32), (*KEYS, b"b" * 32), new), 30.0))
    assert {(order.hint.tail, order.hint.return_s) for order in world.all(TellSession)} == {(KEYS[-1], 30.0)}
    assert prefetched(world) == []
    world.sleep(30.0)
    assert prefetched(world) == [KEYS]
    assert [order.keys for order in world.all(ReplicatePrefix)] == [KEYS]


def test_prompts_that_will_not_come_after_all_order_nothing_more() -> None:
    world = cluster()
    stored(world, *KEYS, cold=KEYS)
    world.post(PromptsAnnounced("", (KEYS,), 30.0))
    world.sleep(30.0 - MEMORY_LEAD_S)
    assert prefetched(world) == [KEYS]
    world.post(PromptsAnnounced("", (KEYS,), None))
    last = world.all(TellSession)[-1]
    assert (last.prefetch, last.hint.return_s) == ((), None)
    world.sleep(60.0)
    assert (len(prefetched(world)), world.all(ReplicatePrefix)) == (1, [])


@pytest.mark.parametrize("computed", [True, False])
def test_blocks_on_ssd_are_read_while_the_prompt_waits(computed: bool) -> None:
    """Until the prompt is computed, or its client is gone."""
    world = cluster()
    stored(world, *KEYS, cold=KEYS)
    world.report("prefill-0", 64, drain_s=5.0)
    number = world.arrive(keys=KEYS)
    world.promise(world.one(CallReserve))
    assert prefetched(world) == [KEYS]
    if computed:
        world.first_token(world.one(CallPrefill), CompletionReason.STOP)
    else:
        world.post(ClientGone(number))
    told = world.all(TellSession)
    assert [(order.instance, order.hint.session, bool(order.prefetch)) for order in told] == [
        (STORE, told[0].hint.session, True),
        (STORE, told[0].hint.session, False),
    ]


def test_a_prompt_that_does_not_wait_orders_nothing() -> None:
    world = cluster()
    stored(world, *KEYS, cold=KEYS)
    world.arrive(keys=KEYS)
    world.promise(world.one(CallReserve))
    assert world.all(TellSession) == []
