"""On a rate-limited link, recorded spans show layer l's sending beside layer l+1's computing."""

import json
from pathlib import Path
from typing import Any

from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import Client, SamplingParams
from tests.integration.conftest import tokens, with_flags


def read_spans(folder: Path) -> list[dict[str, Any]]:
    """All spans of all services, by start."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    events = (json.loads(line) for line in lines)
    return sorted((event for event in events if event["ph"] in "Xi"), key=lambda event: float(event["ts"]))


def named(spans: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["name"] == name]


def test_layers_leave_while_the_next_compute(plan: StackPlan) -> None:
    """The link is so slow that a layer's sending lasts longer than a layer's computing."""
    assert plan.spans_dir is not None
    slow = with_flags(plan, "prefill", "--step-tokens", "512", "--link-bytes-per-s", str(4 << 20))
    with LocalStack(slow) as stack, Client(stack.address) as client:
        client.generate(token_ids=tokens(500, "warm"), sampling=SamplingParams(max_tokens=2, ignore_eos=True))
        wait_at_rest(stack.address, timeout_s=30)
        result = client.generate(
            token_ids=tokens(1500, "overlap"),
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            request_id="overlap",
        )
        assert len(result.token_ids) == 4
        wait_at_rest(stack.address, timeout_s=30)
    spans = read_spans(plan.spans_dir)
    sends = [span for span in named(spans, "kv.send") if span["args"].get("request") == "overlap"]
    steps = {span["args"]["step"] for span in sends if "step" in span["args"]}
    layers = [span for span in named(spans, "engine.layer") if span["args"]["step"] in steps]
    overlaps = [
        (send, layer)
        for send in sends
        for layer in layers
        if layer["args"]["step"] == send["args"]["step"]
        and layer["args"]["layer"] == send["args"]["layer"] + 1
        and max(layer["ts"], send["ts"]) < min(layer["ts"] + layer["dur"], send["ts"] + send["dur"])
    ]
    pairs = {(send["args"]["step"], send["args"]["layer"]) for send, _ in overlaps}
    possible = {(layer["args"]["step"], layer["args"]["layer"] - 1) for layer in layers if layer["args"]["layer"] > 0}
    assert pairs, "no layer's sending overlapped the next layer's computing"
    assert len(pairs) >= len(possible) // 2, f"{len(pairs)} of {len(possible)} layer pairs overlap"


def test_decode_starts_after_the_last_slice(plan: StackPlan) -> None:
    """Decode's first step begins after the transfer is whole, and at once."""
    assert plan.spans_dir is not None
    slow = with_flags(plan, "prefill", "--link-bytes-per-s", str(4 << 20))
    with LocalStack(slow) as stack, Client(stack.address) as client:
        client.generate(
            token_ids=tokens(700, "first step"),
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            request_id="first-step",
        )
        wait_at_rest(stack.address, timeout_s=30)
    spans = read_spans(plan.spans_dir)
    (complete,) = [span for span in named(spans, "transfer.complete") if span["args"]["request"] == "first-step"]
    last_send = max(
        span["ts"] + span["dur"] for span in named(spans, "kv.send") if span["args"]["request"] == "first-step"
    )
    steps = [span for span in named(spans, "decode.step") if span["ts"] >= complete["ts"]]
    assert steps, "decode made no step after the transfer"
    assert not [span for span in named(spans, "decode.step") if span["ts"] < complete["ts"]], (
        "a step before the last slice"
    )
    sending = [span for span in named(spans, "kv.send") if span["args"]["request"] == "first-step"]
    whole = max(span["ts"] + span["dur"] for span in sending) - min(span["ts"] for span in sending)
    delay = steps[0]["ts"] - last_send
    print(f"transfer {whole / 1e3:.1f} ms, first step {delay / 1e3:.2f} ms after the last slice left")
    assert delay < whole, "the first step waited longer than the whole transfer took"
