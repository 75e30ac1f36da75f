"""Requests of several answers, and of several tenants, in a cluster in virtual time; what kvstores report."""

from dataclasses import replace

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.conductor.core.events import Event, LoadReported
from moonpool.simulator.clock import SimulatedWorld, ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.members import Members
from moonpool.simulator.cluster.requests import DONE, Request
from moonpool.simulator.cluster.store import Store
from moonpool.simulator.network import Calls, Link, SimulatedNetwork
from moonpool.simulator.traces.mooncake import TraceRequest
from tests.unit.simulator.cluster.rig import NO_DELAYS, config, request, run


def of_three(at_s: float = 0.0, tokens: int = 100, answer: int = 4) -> TraceRequest:
    return replace(request(at_s, tokens, answer, 0), choices=3)


def test_answers_of_one_prompt_run_together() -> None:
    """The prompt is computed and sent once; a step is over three sequences, whose contexts count each."""
    (value,), cluster = run(config(kvstore=0), [of_three()])
    assert (value.outcome, value.made, value.whole) == (DONE, 12, True)
    assert value.first_at == ps(0.1)
    steps = [ps(0.013) + 3 * (100 + number) * ps(1e-6) for number in (1, 2, 3)]
    assert [answer.intervals for answer in value.answers] == [[ps(0.0025) + steps[0], *steps[1:]]] * 3
    assert (cluster.prefills[0].use.computed_tokens, cluster.decodes[0].use.steps) == (100, 3)


def storm(name: str, at_s: float, trace: list[TraceRequest]) -> list[Request]:
    ended: list[Request] = []
    cluster = Cluster(config(prefill=2, decode=2, kvstore=0), ended.append)
    cluster.feed(trace)
    cluster.world.at(ps(at_s), lambda _: cluster.crash(name, 1.0))
    cluster.run()
    cluster.check_at_rest()
    return ended


@pytest.mark.parametrize("decode", ["d0", "d1"])
def test_several_answers_go_on_without_their_decode(decode: str) -> None:
    """What the client has of each answer does not come again."""
    (value,) = storm(decode, 0.5, [of_three(answer=60)])
    assert (value.outcome, [answer.made for answer in value.answers]) == (DONE, [60] * 3)
    assert [len(answer.intervals) for answer in value.answers] == [59] * 3
    assert value.attempts in (1, 2)  # it ran at one of them


def test_the_crash_of_one_of_them_places_it_again() -> None:
    ended = [storm(name, 0.5, [of_three(answer=60)])[0] for name in ("d0", "d1")]
    assert sorted(each.attempts for each in ended) == [1, 2]


@pytest.mark.parametrize("choices", [1, 3])
def test_answers_are_resumed_after_the_loss_of_their_conductor(choices: int) -> None:
    """They run on meanwhile. One that was not placed is asked for anew."""
    (begun,) = storm("c0", 0.5, [replace(of_three(answer=60), choices=choices)])
    assert (begun.outcome, begun.resumed, begun.attempts) == (DONE, 1, 1)
    assert [(answer.made, len(answer.intervals)) for answer in begun.answers] == [(60, 59)] * choices
    (later,) = storm("c0", 0.5, [of_three(at_s=1.0)])
    assert (later.outcome, later.attempts) == (DONE, 1)


def test_tenants_share_no_prefix() -> None:
    """The second is another one's, the third the first one's."""
    trace = [replace(request(float(at), 200, 2, 0), tenant=name) for at, name in enumerate(("a", "b", "a"))]
    assert [each.reused for each in run(config(kvstore=0), trace)[0]] == [0, 0, 192]


def test_the_flood_of_one_tenant_does_not_delay_another_one() -> None:
    """Twenty prompts of a fifth of a second are there: who else comes waits for the one that is being computed."""
    flood = [replace(request(0.0, 200, 1, 100 * number), tenant="flood") for number in range(20)]
    calm = replace(request(0.05, 200, 1, 5000), tenant="calm")
    *_, alone = run(config(kvstore=0), [*flood, replace(calm, tenant="flood")])[0]
    *_, apart = run(config(kvstore=0), [*flood, calm])[0]
    assert alone.first_at == ps(21 * 0.2)
    assert apart.first_at - apart.arrived < ps(0.7)


def test_a_kvstore_reports_what_it_is_busy_with() -> None:
    """A read, then a write of ten blocks."""
    wanted, world = config(), SimulatedWorld()
    heard: list[Event] = []
    members = Members(wanted, Calls(world, NO_DELAYS, 0), heard.append)
    network, keys = SimulatedNetwork(world), [BlockKey(bytes([number]) * 32) for number in range(10)]
    store = Store(world, network, wanted, "s0", lambda changes: None, lambda: members.changed("s0"))
    members.join("s0", store.load, store.held(), store.epoch)
    loan = store.lend(keys, 0)
    world.at(ps(1.0), lambda _: loan.give_back())
    world.at(ps(2.0), lambda _: store.write(keys, Link("other", 1e6), lambda: None))
    world.run()
    loads = [(each.load.running, each.load.cached_blocks) for each in heard if isinstance(each, LoadReported)]
    assert loads == [(0, 0), (1, 0), (0, 0), (1, 0), (0, 10)]
