"""`moonpool top`: figures for scripts, and the picture, of what a conductor says."""

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from moonpool.cli.cluster import BAR_WIDTH, bar, render_cluster, run_state, run_top, state_figures
from moonpool.client.testing import FakeConductor
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

TIERS = (("dram", 0, 100), ("ssd", 1, 4))


def cluster() -> FakeConductor:
    fake = FakeConductor()
    state = fake.state
    state.ready, state.model.name, state.model.max_tokens = True, "tiny", 4096
    pool = pb.LoadReport(running=3, waiting=2, queued_tokens=1500, free_blocks=25)
    tiers = [
        pb.TierLoad(name="dram", used_bytes=0, capacity_bytes=100),
        pb.TierLoad(name="ssd", used_bytes=1, capacity_bytes=4),
    ]
    for name, kind, load, blocks in (
        ("decode-0", kv_pb2.INSTANCE_KIND_DECODE, pool, 100),
        ("kvstore-0", kv_pb2.INSTANCE_KIND_KVSTORE, pb.LoadReport(tiers=tiers, draining=True), 0),
    ):
        state.instances.add(instance=kv_pb2.Instance(id=name, kind=kind), load=load, total_blocks=blocks)
    recent = state.recent
    recent.window_s, recent.requests = 50.0, 10
    recent.usage.CopyFrom(pb.Usage(prompt_tokens=200, cached_tokens=50, completion_tokens=100))
    recent.ttft_s.CopyFrom(pb.Quantiles(p50=0.25, p99=0.5))
    timing = pb.Timing(ttft_s=0.25, tpot_s=0.0125)
    recent.last.add(request_id="r1", tenant="ann", usage=pb.Usage(prompt_tokens=20), timing=timing)
    return fake


def test_figures_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster().client() as client:
        run_top(client, interval_s=1.0, once=True, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["hit_rate"], found["requests_per_s"], found["tokens_per_s"]) == (0.25, 0.2, 2.0)
    assert found["recent"]["ttft_s"] == {"p50": 0.25, "p99": 0.5}
    assert [tier["name"] for tier in found["instances"][1]["tiers"]] == ["dram", "ssd"]


def test_in_a_pipe_the_picture_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster().client() as client:
        run_top(client, interval_s=1000.0, once=False, as_json=False)
    assert capsys.readouterr().out.count("decode-0") == 1


def test_an_engine_for_prompts_and_answers_has_both_roles(capsys: pytest.CaptureFixture[str]) -> None:
    fake = cluster()
    fake.state.instances[0].computes_prompts = True
    with fake.client() as client:
        (engine, kvstore) = client.cluster_state().instances
        assert (engine.kind, engine.role, kvstore.role) == ("decode", "both", "kvstore")
        run_state(client, as_json=False)
        run_top(client, interval_s=1.0, once=True, as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("decode-0")]
    assert [row[1] for row in rows] == ["both", "both"]


def test_nothing_was_answered() -> None:
    with FakeConductor().client() as client:
        assert state_figures(client.cluster_state())["hit_rate"] is None


def test_picture() -> None:
    out = StringIO()
    with cluster().client() as client:
        Console(file=out, width=160).print(render_cluster(client.cluster_state()))
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("ready, serves tiny (4,096 tokens, blocks of 0)")
    assert lines[2] == (
        "last 50 s: 10 answered, TTFT p50 250 ms, p99 500 ms, TPOT -, 25% of prompt tokens from the cache, 2.0 tokens/s"
    )
    assert [re.split(r"  +", line.strip()) for line in (*lines[5:8], lines[-1])] == [
        ["decode-0", "decode", "3", "2", "1500", "75%", "100 blocks", "pool", bar(75, 100)],
        ["kvstore-0", "kvstore", "0", "0", "0", "0%", "100 bytes", "dram", bar(0, 100), "draining"],
        ["kvstore-0", "kvstore", "25%", "4 bytes", "ssd", bar(1, 4), "draining"],
        ["r1", "ann", "20", "0", "0", "250", "12.5"],
    ]


@pytest.mark.parametrize(
    ("used", "total", "filled"), [(0, 100, 0), (1, 100_000, 1), (50, 100, BAR_WIDTH // 2), (9, 9, BAR_WIDTH)]
)
def test_bar(used: int, total: int, filled: int) -> None:
    assert bar(used, total) == "█" * filled + "░" * (BAR_WIDTH - filled)


def test_output_that_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster().client() as client:
        run_top(client, interval_s=1.0, once=True, as_json=False)
    assert "decode-0" in capsys.readouterr().out
