"""Recorded spans show when each layer was computed and when it left, and when decode started.

The engine is emulated, one layer takes half a second and its KV a hundredth on the rate-limited link, so that the
order of events does not depend on how busy the machine is.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client
from tests.integration.conftest import small_plan, tokens, with_flags
from tests.integration.stack import CheckedStack

LAYERS, LAYER_S = 4, 0.5
TOKENS = 500
LINK_BYTES_PER_S = 2 << 20
PROFILE = f"""
name: slow-layers
hardware: none; a layer takes half a second whatever the prompt
model: {{kv_bytes_per_token: {32 * LAYERS}, max_tokens: 4096}}
kv: {{layers: {LAYERS}, kv_heads: 2}}
prefill: {{base_s: {LAYERS * LAYER_S}, per_token_s: 0.0, per_pair_s: 0.0}}
decode: {{base_s: 1.0e-3, per_sequence_s: 0.0, per_context_token_s: 0.0}}
"""


@dataclass(frozen=True)
class Span:
    """What a service recorded; microseconds of the host's monotonic clock."""

    name: str
    begin: float
    end: float
    args: dict[str, Any]


@pytest.fixture(scope="module")
def spans(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
    """All spans of a stack that served one prompt in one step, by their beginning."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow-layers.yaml").write_text(PROFILE)
    plan = dataclasses.replace(
        small_plan(checkpoint, folder), kvstore=0, dtype="auto", engine=f"emulated:{folder / 'slow-layers.yaml'}"
    )
    slow = with_flags(
        plan, "prefill", "--max-num-batched-tokens", "512", "--set", f"link_bytes_per_s={LINK_BYTES_PER_S}"
    )
    slow = with_flags(slow, "conductor", "--set", "decode_prompt_tokens=0")
    with CheckedStack(slow) as stack, Client(stack.address) as client:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        result = client.generate(token_ids=tokens(TOKENS, "overlap"), sampling=sampling)
        assert len(result.token_ids) == 4
    return read_spans(folder / "spans")


def read_spans(folder: Path) -> list[Span]:
    """All spans and instants of all services, by their beginning."""
    events = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    found = [Span(e["name"], e["ts"], e["ts"] + e["dur"], e["args"]) for e in events if e["ph"] in "Xi"]
    return sorted(found, key=lambda span: span.begin)


def by_layer(spans: list[Span], name: str) -> dict[int, Span]:
    """The spans of a name by their layer; each layer has one."""
    found = [span for span in spans if span.name == name]
    layers = {span.args["layer"]: span for span in found}
    assert sorted(layers) == list(range(LAYERS))
    assert len(found) == LAYERS, f"{name}: a layer has several"
    return layers


def test_every_interior_layer_has_left_before_the_last_is_computed(spans: list[Span]) -> None:
    computed, sent = by_layer(spans, "engine.layer"), by_layer(spans, "kv.send")
    last = computed[LAYERS - 1].end
    for layer in range(LAYERS - 1):
        left = (last - sent[layer].end) / 1e3
        print(f"layer {layer} had left {left:.1f} ms before the last layer was computed")
        assert left > 0
    assert sent[LAYERS - 1].begin >= last, "a layer left before it was computed"


def test_a_layer_leaves_while_the_next_is_computed(spans: list[Span]) -> None:
    """A layer's first frame goes after its own and before the next layer's end."""
    computed, sent = by_layer(spans, "engine.layer"), by_layer(spans, "kv.send")
    for layer in range(LAYERS - 1):
        assert computed[layer].end <= sent[layer].begin < computed[layer + 1].end


def test_decode_starts_after_the_last_slice_and_at_once(spans: list[Span]) -> None:
    (complete,) = [span for span in spans if span.name == "transfer.complete"]
    steps = [span for span in spans if span.name == "decode.step"]
    last_sent = by_layer(spans, "kv.send")[LAYERS - 1]
    assert last_sent.begin < complete.begin
    assert len(steps) == 3
    assert steps[0].begin >= complete.begin, "a step before the last slice"
    delay_s = (steps[0].begin - complete.begin) / 1e6
    print(f"first step {1e3 * delay_s:.2f} ms after the last slice had come")
    assert delay_s < LAYER_S, "the first step came late"
