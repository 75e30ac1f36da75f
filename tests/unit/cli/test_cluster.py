"""`moonpool state` and `moonpool explain` print what the conductor says, for people and as JSON."""

import json
import re

import pytest

from moonpool.base.errors import NotFound
from moonpool.cli.cluster import run_explain, run_state
from moonpool.client.testing import FakeConductor
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2


def cells(row: str) -> list[str]:
    """The cells of a table's row that are not empty."""
    return re.split(r"  +", row.strip())


def cluster() -> FakeConductor:
    fake = FakeConductor()
    instance = kv_pb2.Instance(id="decode-0", epoch=7, kind=kv_pb2.INSTANCE_KIND_DECODE, address="host:1")
    load = pb.LoadReport(running=3, waiting=2, queued_tokens=1500, free_blocks=60, cached_blocks=30, promised_blocks=4)
    fake.state = pb.ClusterStateResponse(
        ready=True,
        conductor=kv_pb2.Instance(id="conductor-0", address="host:0"),
        instances=[pb.InstanceState(instance=instance, load=load, indexed_blocks=12, total_blocks=100)],
    )
    fake.state.model.name = "tiny"
    fake.state.model.max_tokens = 4096
    return fake


def explained() -> FakeConductor:
    fake = FakeConductor()
    placement = pb.Placement(prefill="prefill-1", decode="decode-0", predicted_ttft_s=0.25, predicted_tpot_s=0.01)
    candidates = [
        pb.CandidateExplanation(instance="prefill-0", queue_s=1.0, prefill_s=0.5),
        pb.CandidateExplanation(
            instance="prefill-1",
            local_blocks=3,
            used_blocks=5,
            load_s=0.05,
            prefill_s=0.2,
            source="decode-1",
            cold_blocks=1,
        ),
        pb.CandidateExplanation(instance="prefill-2", excluded="draining"),
    ]
    attempt = pb.Attempt(
        placement=placement, candidates=candidates, placed_s=0.125, prompt_tokens=49, local_tokens=9, loaded_tokens=24,
        first_token_s=0.5, last_token_s=1.0, tokens=4, transport="local", overtaken_tokens=8,
        prefill_s=0.25, encode_s=0.125, rows_s=0.0625, rows_tokens=5,
    )  # fmt: skip
    fake.explanations["r1"] = pb.ExplainResponse(
        placement=placement,
        candidates=candidates,
        measured_ttft_s=0.5,
        policy="cache_aware",
        attempts=[attempt],
    )
    alone = pb.Placement(prefill="decode-0", decode="decode-0", predicted_ttft_s=0.25, predicted_tpot_s=0.01)
    fake.explanations["r3"] = pb.ExplainResponse(placement=alone, attempts=[pb.Attempt(placement=alone)])
    fake.explanations["r2"] = pb.ExplainResponse(refused="predicted time to first token 9 s exceeds the limit")
    fake.explanations["r4"] = pb.ExplainResponse(failed="the engine died")
    fake.explanations["r5"] = pb.ExplainResponse(cancelled=True)
    return fake


def test_state_shows_load_and_blocks_of_every_instance(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster().client() as client:
        run_state(client, as_json=False)
    headline, *_, row = capsys.readouterr().out.splitlines()
    assert headline == "host:0: ready, serves tiny (4,096 tokens, blocks of 0)"
    assert cells(row) == ["decode-0", "decode", "host:1", "3", "2", "1500", "10/100", "30", "4"]


def test_state_shows_who_waits_at_the_conductor(capsys: pytest.CaptureFixture[str]) -> None:
    fake = cluster()
    with fake.client() as client:
        run_state(client, as_json=False)
        assert capsys.readouterr().out.splitlines()[1] == "queued at the conductor: 0 for SLO, 0 for decode memory"
        fake.state.queue.CopyFrom(pb.QueueState(for_limits=7, for_room=1, prompt_bytes=4000))
        fake.state.queue.tenants.add(requests=2)
        fake.state.queue.tenants.add(tenant="ann", weight=2.5, requests=9, waiting=8)
        run_state(client, as_json=False)
        found = capsys.readouterr().out.splitlines()
        assert found[1] == "queued at the conductor: 7 for SLO (4,000 bytes), 1 for decode memory"
        rows = [cells(row) for row in found[-2:]]
        assert rows == [["(none)", "0", "2", "0"], ["ann", "2.5", "9", "8"]]
        run_state(client, as_json=True)
    assert json.loads(capsys.readouterr().out)["queue"]["tenants"][1]["waiting"] == 8


def test_state_before_an_engine_has_joined_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeConductor()
    fake.state = pb.ClusterStateResponse(conductor=kv_pb2.Instance(id="conductor-0", address="host:0"))
    with fake.client() as client:
        run_state(client, as_json=False)
    assert capsys.readouterr().out.startswith("host:0: no engine has joined yet\n")


def test_explain_lists_candidates_best_first_and_marks_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with explained().client() as client:
        run_explain(client, "r1", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "policy cache_aware"
    assert [cells(line) for line in lines[4:7]] == [
        ["prefill-1", "3", "5", "0.0000", "0.0500", "0.2000", "0.0000", "0.2500", "decode-1", "1", "chosen"],
        ["prefill-0", "0", "0", "1.0000", "0.0000", "0.5000", "0.0000", "1.5000"],
        ["prefill-2", "0", "0", "-", "-", "-", "-", "-", "draining"],
    ]
    assert lines[7:13] == [
        "placed on prefill-1, then decode-0, KV over local",
        "49 tokens to compute or find: 9 there already, 24 loaded, 16 computed, 8 of them while a slower "
        "load was under way; 4 new tokens of the answer",
        "encoded pictures (5 tokens) came from kvstores in 0.0625 s",
        "pictures took 0.1250 s of 0.2500 s that the prompt was computed",
        "first token: predicted 0.2500 s, came 0.3750 s after the placement; TPOT predicted 0.0100 s",
        "TTFT 0.5000 s, TPOT -",
    ]


def test_explain_tells_of_every_placement(capsys: pytest.CaptureFixture[str]) -> None:
    fake = explained()
    fake.explanations["r1"].attempts[0].ended_s = 1.25
    fake.explanations["r1"].attempts.add(
        placement=pb.Placement(prefill="prefill-0", decode="decode-1"), cause="decode-0 is lost", placed_s=1.5,
        prompt_tokens=53, first_token_s=2.0, last_token_s=2.0, tokens=1,
    )  # fmt: skip
    with fake.client() as client:
        run_explain(client, "r1", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "placement 1, at 0.1250 s",
        "given up at 1.2500 s",
        "placement 2, at 1.5000 s, because decode-0 is lost",
        "placed on prefill-0, then decode-1",
        "gap: no token comes: the request was placed again",
    ):
        assert line in lines
    assert ["2 gap", "1.0000", "1.0000", "█" * 20] in [cells(line) for line in lines]


def test_explain_says_why_a_request_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with explained().client() as client:
        run_explain(client, "r2", as_json=False)
    assert "refused: predicted time to first token 9 s exceeds the limit" in capsys.readouterr().out.splitlines()


def test_explain_says_why_a_request_has_no_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with explained().client() as client:
        run_explain(client, "r4", as_json=False)
        assert "failed: the engine died" in capsys.readouterr().out
        run_explain(client, "r5", as_json=False)
        assert "cancelled: the client stopped the request, or left" in capsys.readouterr().out


def test_explain_says_that_decode_computed_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with explained().client() as client:
        run_explain(client, "r3", as_json=False)
    where = "placed on decode-0 alone, which computes what it does not hold of the prompt"
    assert where in capsys.readouterr().out.splitlines()


def test_without_an_id_the_newest_request_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    fake = explained()
    with fake.client() as client:
        with pytest.raises(NotFound, match="no request has ended"):
            run_explain(client, "", as_json=False)
        for request_id in ("r5", "r1"):
            fake.state.recent.last.add(request_id=request_id)
        run_explain(client, "", as_json=True)
    assert json.loads(capsys.readouterr().out)["request_id"] == "r5"


def test_both_print_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    with explained().client() as client:
        run_explain(client, "r1", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["request_id"] == "r1"
    assert found["placement"]["prefill"] == "prefill-1"
    assert [each["instance"] for each in found["candidates"]] == ["prefill-0", "prefill-1", "prefill-2"]
    with cluster().client() as client:
        run_state(client, as_json=True)
    assert json.loads(capsys.readouterr().out)["instances"][0]["promised_blocks"] == 4


def test_explain_draws_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    fake = explained()
    (attempt,) = fake.explanations["r1"].attempts
    attempt.queue_s, attempt.prefill_s, attempt.computed_s = 0.25, 0.25, 0.5
    attempt.chunks.add(tokens=16, begin_s=0.25, end_s=0.5)
    with fake.client() as client:
        run_explain(client, "r1", as_json=False)
        lines = capsys.readouterr().out.splitlines()
        run_explain(client, "r1", as_json=True)
    assert [cells(line) for line in lines[-8:]] == [
        ["place", "0.0000", "0.0000", "█"],
        ["queue", "0.0000", "0.2500", "█" * 10],
        ["chunk", "16", "0.2500", "0.2500", "█" * 10],
        ["steps", "4", "0.5000", "0.5000", "█" * 20],
        ["place: is tokenised and placed, and room is promised"],
        ["queue: waits at the prefill instance"],
        ["chunk: a step computes a part of the prompt"],
        ["steps: decode generates the answer"],
    ]
    assert [phase["name"] for phase in json.loads(capsys.readouterr().out)["phases"]] == [
        "place",
        "queue",
        "chunk",
        "steps",
    ]


def test_an_unknown_request_is_an_error() -> None:
    with explained().client() as client, pytest.raises(NotFound, match="r9"):
        run_explain(client, "r9", as_json=False)
