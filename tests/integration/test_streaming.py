"""On a rate-limited link, recorded spans show layer l's sending beside layer l+1's computing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import Client, SamplingParams
from moonpool.model.create import create
from tests.integration.conftest import tokens, with_flags


def read_spans(folder: Path) -> list[dict[str, Any]]:
    """All spans of all services, by start."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    events = (json.loads(line) for line in lines)
    return sorted((event for event in events if event["ph"] in "Xi"), key=lambda event: float(event["ts"]))


def named(spans: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["name"] == name]


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of a 512-token chunk takes it tens of milliseconds to compute and has 1 MiB of KV."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
    return create(
        "tiny-llama",
        tmp_path_factory.mktemp("wide"),
        seed=1,
        dtype="float32",
        overrides=sizes | {"head_dim": 64, "num_hidden_layers": 6},
    )


def test_layers_leave_while_the_next_compute(plan: StackPlan, wide_checkpoint: Path) -> None:
    """The link is rate-limited so that a layer's slices take about 16 ms, less than the next layer's computing."""
    assert plan.spans_dir is not None
    wide = dataclasses.replace(plan, model=str(wide_checkpoint), kvstore=0, kv_bytes=64 << 20)
    slow = with_flags(wide, "prefill", "--step-tokens", "512", "--link-bytes-per-s", str(64 << 20))
    with LocalStack(slow) as stack, Client(stack.address) as client:
        result = client.generate(
            token_ids=tokens(1536, "overlap"),
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            request_id="overlap",
        )
        assert len(result.token_ids) == 4
        wait_at_rest(stack.address, timeout_s=30)
    spans = read_spans(plan.spans_dir)
    layers = {(span["args"]["step"], span["args"]["layer"]): span for span in named(spans, "engine.layer")}
    sends = [span for span in named(spans, "kv.send") if span["args"]["request"] == "overlap"]
    followed = {(send["args"]["step"], send["args"]["layer"] + 1) for send in sends} & layers.keys()
    overlapping = {
        key
        for send in sends
        if (key := (send["args"]["step"], send["args"]["layer"] + 1)) in layers
        and max(layers[key]["ts"], send["ts"]) < min(layers[key]["ts"] + layers[key]["dur"], send["ts"] + send["dur"])
    }
    print(f"{len(overlapping)} of {len(followed)} layers computed while the layer before them was sent")
    assert len(followed) == 3 * 5, "three chunks, five layers that follow another"
    assert len(overlapping) >= len(followed) // 2


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
    assert delay < whole / 4, "the first step came late after the last slice"
