"""Plans: the least-cost mix by full search, limits that cannot be kept, hardware files, the report."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.eviction import SHIPPED
from moonpool.base.errors import ConfigError
from moonpool.cli.main import app
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.experiments.frame import RequestSource, simulate
from moonpool.simulator.experiments.report import Summary
from moonpool.simulator.planning.page import page
from moonpool.simulator.planning.planner import (
    Hardware,
    InstanceMix,
    NoPlan,
    PlanSearch,
    bundled_hardware,
    check_possible,
    load_hardware,
    parse_slo,
)
from moonpool.simulator.traces.mooncake import write_trace
from tests.examples import examples
from tests.unit.simulator.cluster.rig import NO_DELAYS, PROFILE, request

HARDWARE = Hardware("round", {"round": "none"}, {"prefill": 3.0, "decode": 2.0, "kvstore": 1.0}, 10**9, 0)
DEAR_DECODE = Hardware("dear decode", {"round": "none"}, {"prefill": 1.0, "decode": 10.0, "kvstore": 20.0}, 10**9, 0)


def base(slo: SloTargets) -> ClusterConfig:
    return ClusterConfig(profile=PROFILE, block_size=64, max_num_batched_tokens=256, slo=slo, delays=NO_DELAYS)


@pytest.fixture
def trace(tmp_path: Path) -> RequestSource:
    path = tmp_path / "trace.jsonl"
    requests = [request(0.25 * number, 500, 30, 100 * (number % 6)) for number in range(24)]
    write_trace(path, requests)
    path.write_text('{"block_size": 64}\n' + path.read_text())
    return RequestSource(path)


Serve = Callable[[ClusterConfig], Summary]


def serving(trace: RequestSource) -> Serve:
    return lambda config: simulate(config, trace.read())[0]


def silent(line: str) -> None:
    """Takes progress."""


def full_search(
    config: ClusterConfig, hardware: Hardware, serve: Serve, goal: float, bound: int, stores: Iterable[int]
) -> tuple[float, InstanceMix]:
    """The least cost, and the first mix that has it, of all with so many kvstores."""
    found = []
    for kvstore, prefill, decode in product(stores, range(1, bound + 1), range(1, bound + 1)):
        wanted = replace(config, prefill=prefill, decode=decode, kvstore=kvstore)
        if serve(wanted).goodput_share >= goal:
            found.append((hardware.cost(prefill, decode, kvstore), InstanceMix(prefill, decode, kvstore)))
    return min(found)


def test_the_best_mix_is_that_of_a_full_search() -> None:
    """Prompts wait for room at decode, so with more prefill instances fewer decode instances will do, for a while."""
    config, goal, bound = replace(base(SloTargets(1.5, 0.05)), pool_blocks=20), 0.9, 3
    trace = [request(0.125 * number, 500, 8, 100 * (number % 20)) for number in range(16)]
    known: dict[ClusterConfig, Summary] = {}

    def serve(config: ClusterConfig) -> Summary:
        if config not in known:
            known[config] = simulate(config, trace)[0]
        return known[config]

    for hardware in (HARDWARE, DEAR_DECODE):
        plan = PlanSearch(config, hardware, serve, goal, bound, silent).plan()
        assert (plan.cost_per_hour, plan.best) == full_search(config, hardware, serve, goal, bound, (0, 1))


def test_a_plan_says_what_it_is_sensitive_to(trace: RequestSource) -> None:
    config, goal = base(SloTargets(0.75, 0.03)), 0.9
    plan = PlanSearch(config, HARDWARE, serving(trace), goal, 3, silent).plan()
    assert plan.sensitivity["as planned"] >= goal
    assert plan.sensitivity["20 % more requests a second"] <= plan.sensitivity["20 % fewer requests a second"]
    text = page(plan, {"trace": "<small>"}, goal)
    assert text.count("<svg") == 2
    assert "&lt;small&gt;" in text
    assert str(plan.best) in text


def good_where(need: Callable[[int, int, int], bool], tried: list[InstanceMix]) -> Serve:
    """A trace that is served well where `need` says so, by numbers of prefill, decode and kvstore instances."""

    def serve(config: ClusterConfig) -> Summary:
        tried.append(InstanceMix(config.prefill, config.decode, config.kvstore))
        return Summary(1, {}, 1.0, 1.0, 1.0, 1.0, float(need(config.prefill, config.decode, config.kvstore)), 0.0)

    return serve


BOUND = 6
COSTS = st.sampled_from([0.0, 0.1, 1.0, 1.5, 3.0, 10.0])


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.lists(st.integers(1, BOUND + 2), min_size=BOUND, max_size=BOUND), min_size=BOUND + 1, max_size=BOUND + 1
    ),
    st.tuples(COSTS, COSTS, COSTS),
)
def test_no_mix_costs_less_where_more_instances_are_never_worse(
    drawn: list[list[int]], costs: tuple[float, float, float]
) -> None:
    """Of those with 0, 1, 2 or 4 kvstores, and with one more or one fewer than the best has."""
    needed = [sorted(decodes, reverse=True) for decodes in drawn]  # by kvstores and prefill instances

    def need(prefill: int, decode: int, kvstore: int) -> bool:
        return decode >= needed[min(kvstore, BOUND)][min(prefill, BOUND) - 1]

    hardware = Hardware("drawn", {}, dict(zip(("prefill", "decode", "kvstore"), costs, strict=True)), 1, 0)
    config, serve = base(SloTargets()), good_where(need, [])
    try:
        plan = PlanSearch(config, hardware, serve, 1.0, BOUND, silent).plan()
    except NoPlan:
        assert not any(need(BOUND, BOUND, kvstore) for kvstore in (0, 1, 2, 4))
        return
    near = {plan.best.kvstore - 1, plan.best.kvstore + 1} & set(range(BOUND + 1))
    stores = {0, 1, 2, 4, plan.best.kvstore} | near
    assert (plan.cost_per_hour, plan.best) == full_search(config, hardware, serve, 1.0, BOUND, stores)


def test_the_walk_goes_as_far_as_it_pays_and_looks_at_few_mixes() -> None:
    """Forty prefill instances save the last three of ten decode instances that cost ten times as much."""
    tried: list[InstanceMix] = []
    serve = good_where(lambda prefill, decode, kvstore: decode >= 10 - 3 * (prefill >= 40) and prefill >= 12, tried)
    for cost, best in ((20.0, InstanceMix(40, 7, 0)), (1.0, InstanceMix(12, 10, 0))):
        tried.clear()
        hardware = Hardware("walk", {}, {"prefill": 1.0, "decode": cost, "kvstore": 100.0}, 1, 0)
        assert PlanSearch(base(SloTargets()), hardware, serve, 1.0, 64, silent).plan().best == best
        assert len(tried) < 60


def test_kvstores_are_doubled_while_that_pays_and_then_counted_back() -> None:
    serve = good_where(lambda prefill, decode, kvstore: prefill >= 16 - min(kvstore, 13) and decode >= 2, [])
    hardware = Hardware("stores", {}, {"prefill": 1.0, "decode": 1.0, "kvstore": 0.5}, 1, 0)
    assert PlanSearch(base(SloTargets()), hardware, serve, 1.0, 32, silent).plan().best == InstanceMix(3, 2, 13)


def test_no_mix_is_good_enough(trace: RequestSource) -> None:
    search = PlanSearch(base(SloTargets(0.01, 0.03)), HARDWARE, serving(trace), 0.9, 2, silent)
    with pytest.raises(NoPlan, match=r"no mix of at most 2 instances of a kind reaches a goodput of 90\.0%"):
        search.plan()


def test_limits_are_read() -> None:
    assert parse_slo("ttft=30,tbt=0.1") == parse_slo("tbt=0.1, ttft=30") == SloTargets(30.0, 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=30", "tbt is missing"),
        ("ttft=30,tbt=0.1,e2e=3", "has 'e2e=3'"),
        ("ttft=30,ttft=20,tbt=0.1", "has 'ttft=20'"),
        ("ttft=-1,tbt=0.1", "ttft must be between 0 and 3600 seconds, is '-1'"),
        ("ttft=1,tbt=0", "tbt must be between 0 and 60 seconds, is '0'"),
        ("ttft=nan,tbt=1", "is 'nan'"),
        ("ttft=1e9,tbt=1", "is '1e9'"),
        ("ttft=soon,tbt=1", "is 'soon'"),
        ("", "has ''"),
    ],
)
def test_absurd_limits_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_slo(text)
    assert message in str(refused.value)


def test_limits_below_one_token_are_refused() -> None:
    check_possible(PROFILE, SloTargets(0.01, 0.012))
    with pytest.raises(ConfigError, match=r"tbt=0.01 cannot be kept: on round numbers one token alone takes 0.011 s"):
        check_possible(PROFILE, SloTargets(0.01, 0.01))
    with pytest.raises(ConfigError, match=r"ttft=0.0005 cannot be kept"):
        check_possible(PROFILE, SloTargets(0.0005, 0.1))


def test_bundled_hardware_is_whole() -> None:
    for name in bundled_hardware():
        hardware = load_hardware(name)
        assert hardware.name == name
        assert all(hardware.profile(model).pool_bytes >= 0 for model in hardware.models)
    with pytest.raises(ConfigError, match=r"no 'gpt' on a800x8; there are llama3-70b"):
        load_hardware("a800x8").profile("gpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: a800x8", "nam: a800x8"), "nam"),
        (("  decode: 1.0", ""), "cost_per_hour.decode: is missing"),
        (("  decode: 1.0", "  decode: -1"), "cost_per_hour.decode: must be a number of at least 0, is -1"),
        (("  decode: 1.0", "  decode: 1.0\n  router: 2"), "cost_per_hour.router: no such field"),
        (("  dram_bytes: 1.0e+12", "  dram_bytes: much"), "kvstore.dram_bytes: must be a number"),
    ],
)
def test_wrong_hardware_is_refused_by_its_field(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    good = (Path(load_hardware.__code__.co_filename).parent / "hardware" / "a800x8.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(good.replace(*change))
    with pytest.raises(ConfigError) as refused:
        load_hardware(str(path))
    assert message in str(refused.value)


def test_the_command(tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    flags = ["--model", "llama3-70b", "--hardware", "a800x8", "--requests", "8", "--bound", "2", "--goodput", "0.8"]
    done = CliRunner().invoke(
        app, ["plan", "--trace", str(SHIPPED), *flags, "--slo", "ttft=10,tbt=0.1", "--report", str(report)]
    )
    assert done.exit_code == 0, done.output
    assert "prefill," in done.output
    assert report.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hardware", "abacus"), "hardware: no 'abacus': neither bundled (a800x8, cpu-2-cores) nor a readable file"),
        (("--model", "gpt"), "model: no 'gpt' on a800x8"),
        (("--slo", "ttft=1"), "slo: tbt is missing"),
        (("--slo", "ttft=1,tbt=0.001"), "slo: tbt=0.001 cannot be kept"),
        (("--goodput", "2"), "goodput: must be a share"),
    ],
)
def test_the_command_refuses(flags: tuple[str, str], message: str) -> None:
    plain = {"--model": "llama3-70b", "--hardware": "a800x8", "--slo": "ttft=10,tbt=0.1"} | {flags[0]: flags[1]}
    done = CliRunner().invoke(
        app, ["plan", "--trace", str(SHIPPED), *(part for pair in plain.items() for part in pair)]
    )
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
