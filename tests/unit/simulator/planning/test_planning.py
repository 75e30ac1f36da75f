"""Plans: the least-cost mix by full search, limits that cannot be kept, hardware files, the report."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.eviction import SHIPPED
from moonpool.cli.main import app
from moonpool.errors import ConfigError
from simulator.cluster.config import ClusterConfig, Slo
from simulator.experiments.frame import Source, simulate
from simulator.planning.hardware import Hardware, bundled_hardware, load_hardware
from simulator.planning.limits import check_possible, parse_slo
from simulator.planning.page import page
from simulator.planning.search import Mix, NoPlan, Search
from simulator.traces.mooncake import write_trace
from tests.unit.simulator.cluster.rig import NO_DELAYS, PROFILE, request

HARDWARE = Hardware("round", {"round": "none"}, {"prefill": 3.0, "decode": 2.0, "kvstore": 1.0}, 10**9, 0)


def base(slo: Slo) -> ClusterConfig:
    return ClusterConfig(profile=PROFILE, block_tokens=64, step_tokens=256, slo=slo, delays=NO_DELAYS)


@pytest.fixture
def trace(tmp_path: Path) -> Source:
    path = tmp_path / "trace.jsonl"
    requests = [request(0.25 * number, 500, 30, 100 * (number % 6)) for number in range(24)]
    write_trace(path, requests)
    path.write_text('{"block_tokens": 64}\n' + path.read_text())
    return Source(path)


def test_the_best_mix_is_that_of_a_full_search(trace: Source) -> None:
    config, goal = base(Slo(0.75, 0.03)), 0.9
    plan = Search(config, HARDWARE, trace, goal, 3, lambda line: None).plan()
    good = {}
    for kvstore in (0, 1, 2, 4):
        for prefill in range(1, 4):
            for decode in range(1, 4):
                wanted = replace(config, prefill=prefill, decode=decode, kvstore=kvstore)
                if simulate(wanted, trace.read())[0].goodput_share >= goal:
                    good[Mix(prefill, decode, kvstore)] = HARDWARE.cost(prefill, decode, kvstore)
    assert (plan.cost_per_hour, plan.best) == min((cost, mix) for mix, cost in good.items())
    assert plan.sensitivity["as planned"] >= goal
    assert plan.sensitivity["20 % more requests a second"] <= plan.sensitivity["20 % fewer requests a second"]
    text = page(plan, {"trace": "<small>"}, goal)
    assert text.count("<svg") == 2
    assert "&lt;small&gt;" in text
    assert str(plan.best) in text


def test_no_mix_is_good_enough(trace: Source) -> None:
    search = Search(base(Slo(0.01, 0.03)), HARDWARE, trace, 0.9, 2, lambda line: None)
    with pytest.raises(NoPlan, match=r"no mix of at most 2 instances of a kind reaches a goodput of 90\.0%"):
        search.plan()


def test_limits_are_read() -> None:
    assert parse_slo("ttft=30,tbt=0.1") == parse_slo("tbt=0.1, ttft=30") == Slo(30.0, 0.1)


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
    check_possible(PROFILE, Slo(0.01, 0.012))
    with pytest.raises(ConfigError, match=r"tbt=0.01 cannot be kept: on round numbers one token alone takes 0.011 s"):
        check_possible(PROFILE, Slo(0.01, 0.01))
    with pytest.raises(ConfigError, match=r"ttft=0.0005 cannot be kept"):
        check_possible(PROFILE, Slo(0.0005, 0.1))


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
    flags = ["--model", "llama3-70b", "--hardware", "a800x8", "--requests", "20", "--bound", "2", "--goodput", "0.8"]
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
