"""What a conductor decided is decided again by the same core from its journal, with members that fail meanwhile."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.errors import ConfigError, MoonpoolError, TransferFailed, Unavailable
from moonpool.base.runtime.journal import JournalWriter, journal_files, read_journal, rerun
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.fair_share import FairShares
from moonpool.cli.main import app
from moonpool.simulator.experiments.replay import replay
from tests.journals import check_journals

from .fakes import decode, expected, no_room, prefill, store
from .stack import stack

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


async def test_a_journal_of_requests_that_fail_and_go_on_reruns_to_the_same_actions(tmp_path: Path) -> None:
    engines = (
        prefill(0, before=[Unavailable("gone")]),
        prefill(1, after=[TransferFailed("a slice is missing")]),
        decode(0, fail_at=[2, 5], break_at=[9]),
        decode(1, refusals=[no_room()], fail_at=[3]),
        store(keys=[bytes([n]) * 32 for n in range(4)]),
    )
    async with stack(*engines, journal_dir=tmp_path) as s:
        prompts = [list(range(30, 70 + n)) for n in range(8)]
        asked = [s.client.generate(token_ids=prompt, sampling=GREEDY) for prompt in prompts]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert isinstance(answer, MoonpoolError) or (
                not isinstance(answer, BaseException) and answer.token_ids == expected(len(prompt), 12)
            )
        assert any(not isinstance(answer, BaseException) and len(answer.placements) > 1 for answer in answers)
        await s.rest()
        digest = s.servicer.core.digest
    (path,) = journal_files(tmp_path)
    again = rerun(path, check=True)
    assert again.difference is None
    assert again.events > 50
    assert again.core.digest() == digest()
    assert check_journals(tmp_path) == again.events
    shown = CliRunner().invoke(app, ["rerun", str(tmp_path)])
    assert (shown.exit_code, shown.output) == (0, f"{path}: {again.events} events, all actions equal\n")
    check_that_others_are_noticed(path, tmp_path / "others")


def check_that_others_are_noticed(path: Path, folder: Path) -> None:
    """Writes a journal whose first event had other actions."""
    core, entries = read_journal(path)
    writer = JournalWriter(folder, "x", 1 << 20)
    writer.before(core)
    event = next(entries)
    writer.record(event.now, event.event, ["another action"])
    writer.close()
    with pytest.raises(AssertionError, match="other actions when rerun"):
        check_journals(folder)
    shown = CliRunner().invoke(app, ["rerun", str(folder)])
    assert shown.exit_code == 1
    assert "event 1 gives other actions" in shown.output


async def test_a_journal_whose_halves_were_overwritten_begins_with_a_snapshot(tmp_path: Path) -> None:
    async with stack(prefill(), decode(), journal_dir=tmp_path, journal_bytes=1 << 16) as s:
        for _ in range(4):
            await asyncio.gather(*(s.client.generate(token_ids=[9] * 40, sampling=GREEDY) for _ in range(16)))
        await s.rest()
    files = journal_files(tmp_path)
    assert len(files) == 2
    assert [rerun(path, check=True).difference for path in files] == [None, None]


async def test_another_policy_is_asked_on_a_journal_what_it_would_have_done(tmp_path: Path) -> None:
    async with stack(prefill(0), prefill(1), decode(), journal_dir=tmp_path, shadow_policy="round_robin") as s:
        for number in range(6):
            answer = await s.client.generate(token_ids=[number + 9] * 40, sampling=GREEDY)
        explained = await s.client.explain(answer.request_id)
        gauges = {gauge.name: gauge.value for gauge in await s.client.stats()}
        await s.rest()
    assert gauges["placements_measured_total"] == gauges["shadow_decisions_total"] == 6
    assert gauges["placement_regret_seconds_total"] >= explained.regret_s >= 0.0
    assert bool(explained.better) == (explained.regret_s > 0.0)
    lines: list[str] = []
    same, turns = replay(tmp_path, ["social", "round_robin"], lines.append).rows
    assert (same["decisions"], same["agreed"], same["predicted_sooner_mean_s"]) == (6, 6, 0.0)
    assert (turns["decisions"], turns["agreed"]) == (6, gauges["shadow_agreed_total"])
    assert turns["recorded_regret_mean_s"] == pytest.approx(gauges["placement_regret_seconds_total"] / 6, rel=1e-3)
    assert lines == [f"{row['policy']}: {row['agreed']} of 6 decisions are the same" for row in (same, turns)]
    shown = CliRunner().invoke(app, ["simulate", "replay", "--journal", str(tmp_path), "--policy", "social", "--json"])
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["rows"] == [same]
    assert "not those that the other would have" in result["assumptions"]["cannot_know"][0]


def test_a_folder_without_decisions_is_named(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "x", 1 << 20)
    writer.before(FairShares())
    writer.close()
    with pytest.raises(ConfigError, match=r"journal: .* has no decision of a conductor"):
        replay(tmp_path, ["social"], print)
