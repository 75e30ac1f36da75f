"""A policy by its name, by an installed package's, and by its object: found, named, or refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.errors import ConfigError
from moonpool.base.runtime.journal import JournalError
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.main import app
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES
from moonpool.conductor.placement.policies import DEFAULT_POLICY, POLICIES
from moonpool.conductor.placement.policies.registry import load_policy, seed_of

from ..core.worlds import SECOND_PER_TOKEN, World, facts
from ..fakes import decode, prefill
from ..stack import stack

PAGE = Path(__file__).parents[4] / "docs/extend/placement_policy.md"
KEYS = [bytes([number]) * 32 for number in range(4)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture
def sticky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example of the page, in a module that can be imported; its name."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "sticky_example.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "sticky_example:Sticky"
    monkeypatch.undo()


def test_the_page_lists_the_policies_there_are() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## The contract")[0]
    listed = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(listed) == sorted(POLICIES)
    assert load_policy(DEFAULT_POLICY) is POLICIES[DEFAULT_POLICY]
    table = PAGE.read_text(encoding="utf-8").partition("## Policies for decode")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`(?! \| first)", table, re.MULTILINE)) == sorted(DECODE_POLICIES)


@pytest.mark.parametrize(("drain_s", "chosen"), [(1.9, "prefill-1"), (2.1, "prefill-0")])
def test_the_example_of_the_page_does_what_the_page_says(sticky: str, drain_s: float, chosen: str) -> None:
    engines = (facts(f"prefill-{number}", speeds=SECOND_PER_TOKEN) for number in range(2))
    world = World(facts("decode-0"), *engines, policy=load_policy(sticky))
    world.events("prefill-1", KEYS[:1])
    world.report("prefill-1", drain_s=drain_s)
    assert world.plan(64, keys=KEYS).prefill.id == chosen


def test_a_package_brings_a_policy_by_its_name(sticky: str, tmp_path: Path) -> None:
    info = tmp_path / "sticky_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sticky-example\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[moonpool.policies]\nsticky = {sticky}\nlost = nowhere:It\n")
    assert type(load_policy("sticky")).__name__ == "Sticky"
    with pytest.raises(ConfigError, match=r"policy: 'lost' of moonpool\.policies cannot be loaded: No module"):
        load_policy("lost")
    with pytest.raises(ConfigError, match=r"there is no policy 'stikcy'; there are random, .*, lost, sticky"):
        load_policy("stikcy")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("quickest", "policy: there is no policy 'quickest'; there are random, round_robin, load_balance"),
        ("nowhere:Policy", "'nowhere:Policy' cannot be loaded: No module named 'nowhere'"),
        ("json:Policy", "'json:Policy' cannot be loaded: module 'json' has no attribute 'Policy'"),
        (":Policy", "':Policy' cannot be loaded"),
        ("json:dumps", "'json:dumps' is no policy: it needs a method `order` and a bool `stores`"),
        ("fractions:Fraction", "'fractions:Fraction' is no policy"),
        ("array:array", "'array:array' cannot be made: TypeError"),
    ],
)
async def test_what_is_no_policy_is_refused_by_its_name(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        async with stack(policy=name):
            pass
    assert caught.value.field == "policy"
    assert why in str(caught.value)


async def test_explain_names_the_policy_and_its_journal_reruns(sticky: str, tmp_path: Path) -> None:
    async with stack(prefill(0), prefill(1), decode(0), policy=sticky, journal_dir=tmp_path / "journal") as s:
        result = await s.client.generate(token_ids=list(range(30, 70)), sampling=GREEDY)
        assert (await s.client.explain(result.request_id)).policy == sticky
        await s.rest()
    run = CliRunner()
    unknown = run.invoke(app, ["rerun", str(tmp_path / "journal")])
    assert isinstance(unknown.exception, JournalError)
    assert "'sticky_example.Sticky', which is no class of a core of this version" in str(unknown.exception)
    trusted = run.invoke(app, ["rerun", str(tmp_path / "journal"), "--policy", "sticky_example"])
    assert (trusted.exit_code, trusted.output.endswith("all actions equal\n")) == (0, True)


async def test_round_robin_sends_requests_in_turn() -> None:
    async with stack(prefill(0), prefill(1), decode(0), policy="round_robin") as s:
        used = [
            (await s.client.generate(token_ids=list(range(30, 70)), sampling=GREEDY)).placements[0].prefill
            for _ in range(4)
        ]
    assert used == ["prefill-0", "prefill-1"] * 2


async def chosen_by(name: str, journal: Path) -> list[str]:
    """Where a conductor of this name sends requests at random; its journal reruns to the same choices."""
    engines = [prefill(number) for number in range(4)]
    async with stack(*engines, decode(0), id=name, policy="random", journal_dir=journal) as s:
        found = [
            (await s.client.generate(token_ids=list(range(30, 70)), sampling=GREEDY)).placements[0].prefill
            for _ in range(8)
        ]
        await s.rest()
    assert CliRunner().invoke(app, ["rerun", str(journal)]).output.endswith("all actions equal\n")
    return found


async def test_conductors_side_by_side_draw_differently(tmp_path: Path) -> None:
    assert seed_of("conductor-0") == seed_of("conductor-0")
    first, second = [await chosen_by(name, tmp_path / name) for name in ("conductor-0", "conductor-1")]
    assert first != second
