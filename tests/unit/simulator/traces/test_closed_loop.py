"""Traces of agents: a request comes after those that it waits for, in the simulator as at a running stack."""

import asyncio
import json
from pathlib import Path

import pytest

from moonpool.base.errors import Unavailable
from moonpool.cli.load_generator.loops import RequestOutcome, TraceSchedule, trace_loop
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.requests import DONE, Request
from moonpool.simulator.traces.agentic import AgenticMix, AgenticWorkload, Lognormal, statistics
from moonpool.simulator.traces.closed_loop import ClosedLoop
from moonpool.simulator.traces.mooncake import TraceError, TraceRequest, read_trace, write_trace
from moonpool.simulator.traces.weka import WekaSessions
from tests.unit.simulator.cluster.rig import config

PARENT = TraceRequest(1000, 600, 20, (0, 1), session="a", name="a#0")
CHILD = TraceRequest(1500, 600, 5, (0, 2), session="a/0", name="a/0#0", wait_for=("a#0",), delay=500)
LATER = TraceRequest(1700, 900, 5, (0, 3), session="a", name="a#1", wait_for=("a#0", "a/0#0"), delay=200)


def lines(*rows: dict[str, object]) -> str:
    return "".join(
        json.dumps({"input_length": 5, "output_length": 2, "hash_ids": [row.pop("id", 1)], **row}) + "\n"
        for row in rows
    )


def read(tmp_path: Path, text: str) -> list[TraceRequest]:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    return read_trace(path)


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [PARENT, CHILD, LATER])
    assert read_trace(path) == [PARENT, CHILD, LATER]


def test_a_session_with_delays_alone_waits_turn_by_turn(tmp_path: Path) -> None:
    """AIPerf's form: no ids of requests, and later turns have no timestamp."""
    turns = read(
        tmp_path, lines({"session_id": "s", "timestamp": 10}, {"timestamp": 20}, {"session_id": "s", "delay": 7.5})
    )
    assert [turn.wait_for for turn in turns] == [(), (), ("s#0",)]
    assert (turns[2].timestamp, turns[2].delay) == (17.5, 7.5)


def test_a_tool_s_time_is_part_of_the_delay(tmp_path: Path) -> None:
    """Dynamo's form: `delay` and `tool_wait_ms` are two parts of one wait."""
    rows = {"request_id": "x", "timestamp": 3}, {"request_id": "y", "wait_for": ["x"], "delay": 2, "tool_wait_ms": 30}
    assert read(tmp_path, lines(*rows))[1].delay == 32


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"timestamp": 1, "wait_for": ["x"]}], "wait_for: no earlier request has the id 'x'"),
        ([{"wait_for": "x"}], "wait_for must be a list of request ids, is 'x'"),
        ([{"session_id": "s"}], "timestamp missing, and the request waits for no other"),
        ([{"timestamp": 1, "request_id": "x"}, {"timestamp": 1, "request_id": "x"}], "request_id 'x' is that of an"),
        ([{"timestamp": 1, "session_id": 3}], "session_id must be a text, is 3"),
        ([{"timestamp": 1, "delay": -1}], "delay must be a number of at least 0, is -1"),
        ([{"timestamp": 1, "tool_wait_ms": True}], "tool_wait_ms must be a number of at least 0, is True"),
    ],
)
def test_a_wrong_wait_is_named(tmp_path: Path, rows: list[dict[str, object]], complaint: str) -> None:
    with pytest.raises(TraceError, match=rf"line {len(rows)}: {complaint}"):
        read(tmp_path, lines(*rows))


def test_a_request_is_kept_until_the_last_of_those_before_has_ended() -> None:
    loop = ClosedLoop()
    assert not loop.keeps(1, PARENT)
    assert loop.keeps(2, CHILD)
    assert loop.keeps(3, LATER)
    assert loop.ended("") == []
    assert len(loop) == 2
    assert loop.ended("a#0") == [(2, CHILD)]
    assert len(loop) == 1
    assert loop.ended("a/0#0") == [(3, LATER)]
    assert len(loop) == 0
    assert not loop.keeps(4, LATER), "all have ended already"


def test_the_simulator_s_agents_wait_for_their_answers() -> None:
    """Each comes its delay after the end of the last before, to the picosecond; `rate` hurries sessions, not tools."""
    ended: list[Request] = []
    cluster = Cluster(config(rate=2.0, block_size=512), ended.append)
    cluster.feed([PARENT, CHILD, LATER])
    cluster.run()
    cluster.check_at_rest()
    parent, child, later = sorted(ended, key=lambda request: request.number)
    assert [each.outcome for each in ended] == [DONE] * 3
    assert parent.arrived == PS // 2
    assert child.arrived == parent.ended_at + PS // 2
    assert later.arrived == child.ended_at + PS // 5


def test_a_slower_cluster_gets_the_next_turns_later() -> None:
    """A closed loop: the same trace takes longer, and no turn overtakes the one before."""
    mix = AgenticMix(
        sessions_per_s=0.5, system=Lognormal(2000, 0.1), task=Lognormal(2000, 0.5), turns=Lognormal(5, 0.3),
        sub_turns=Lognormal(2, 0.1), answer=Lognormal(20, 0.5), result=Lognormal(300, 0.5), tool_s=Lognormal(0.2, 0.5),
        person_s=Lognormal(1.0, 0.5),
    )  # fmt: skip
    requests = AgenticWorkload(1, mix).requests(6)
    ends = []
    for instances in (1, 4):
        requests_ended: list[Request] = []
        cluster = Cluster(config(prefill=instances, block_size=512), requests_ended.append)
        cluster.feed(requests)
        cluster.run()
        cluster.check_at_rest()
        ended = {request.name: request for request in requests_ended}
        for each in requests:
            before = [ended[name].ended_at for name in each.wait_for]
            assert not before or ended[each.name].arrived == max(before) + round(each.delay * PS / 1000)
        ends.append(cluster.clients.ended_at)
    assert ends[0] > ends[1]


async def test_a_running_stack_s_agents_wait_for_their_answers() -> None:
    """Times of 1 ms instead of 1 s; a request that failed has ended, too."""
    sent: list[tuple[str, list[str]]] = []
    requests, over = [PARENT, CHILD, LATER], list[str]()

    async def send(index: int, outcome: RequestOutcome, clock: object) -> None:
        sent.append((requests[index].name, list(over)))
        await asyncio.sleep(0)
        over.append(requests[index].name)
        if index == 1:
            raise Unavailable("gone")

    outcomes = await trace_loop(requests, 1000.0, send)
    assert sent == [("a#0", []), ("a/0#0", ["a#0"]), ("a#1", ["a#0", "a/0#0"])]
    assert [outcome.error for outcome in outcomes] == ["", "Unavailable", ""]
    assert outcomes[1].due >= outcomes[0].ended + 0.0005


async def test_a_trace_begins_at_0_and_keeps_its_times() -> None:
    times = [TraceRequest(1000 * at, 5, 1, (0,)) for at in (10.0, 11.0, 14.0)]
    schedule = TraceSchedule(times, 2.0, lambda: 100.0)
    assert [await schedule.due(time) for time in times] == [0.0, 0.5, 2.0]


def test_the_agentic_mix_has_the_published_shape(tmp_path: Path) -> None:
    requests = AgenticWorkload(1).requests(150)
    assert AgenticWorkload(1).requests(5) == AgenticWorkload(1).requests(5) != AgenticWorkload(2).requests(5)
    found = statistics(requests)
    assert found["turns_p50"] == pytest.approx(43, rel=0.15)
    assert found["input_tokens_p50"] == pytest.approx(142_000, rel=0.1)
    assert found["output_tokens_p50"] == pytest.approx(444, rel=0.1)
    assert found["reusable_share"] > 0.96
    assert found["with_sub_agents"] == pytest.approx(0.44, abs=0.1)
    assert max(request.input_length for request in requests) > AgenticMix().compact_at, "compaction has happened"
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests[:3000])
    assert read_trace(path) == requests[:3000]


def test_weka_s_sessions(tmp_path: Path) -> None:
    """A session with a sub-agent that the parent waits for, and with one in the background."""
    inner = [{"type": "s", "t": 0, "in": 64, "out": 3, "hash_ids": [9], "api_time": 1}]
    session = {
        "id": "w", "block_size": 64,
        "requests": [
            {"type": "s", "t": 0, "in": 130, "out": 7, "hash_ids": [5, 6, 7], "api_time": 2},
            {"type": "subagent", "t": 2, "agent_id": "x", "requests": inner},
            {"type": "n", "t": 10, "in": 192, "out": 8, "hash_ids": [5, 6, 8], "api_time": 1, "think_time": 0.5},
            {"type": "subagent", "t": 12, "agent_id": "y", "requests": inner},
        ],
    }  # fmt: skip
    path = tmp_path / "w.json"
    path.write_text(json.dumps(session))
    sessions = WekaSessions()
    first, child, second, background = sessions.read(path, 1000.0)
    assert sessions.block_size == 64
    assert (first.timestamp, first.wait_for, first.input_length, first.output_length) == (1000.0, (), 130, 7)
    assert (child.wait_for, child.delay) == (("w#0",), 0.0)
    assert (second.wait_for, second.delay) == (("w#0", child.name), 500.0)
    assert background.wait_for == ("w#1",)
    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert first.hash_ids[2] != second.hash_ids[2]
    assert child.hash_ids == background.hash_ids != first.hash_ids[:1]
    other = sessions.read(path, 0.0)
    assert not set(other[0].hash_ids) & set(first.hash_ids), "ids are a file's own"
    path.write_text(json.dumps(session | {"block_size": 32}))
    with pytest.raises(TraceError, match="block_size is 32, other files have 64"):
        sessions.read(path, 0.0)
    path.write_text("{}")
    with pytest.raises(TraceError, match=r"w\.json: no session of an agent \(KeyError: 'block_size'\)"):
        sessions.read(path, 0.0)
