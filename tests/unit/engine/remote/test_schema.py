"""Messages between hosts: the same values arrive, and nothing else does."""

import dataclasses
import pickle
import random
from array import array
from typing import Any

import pytest

from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.media import MediaItem
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import (
    LayerDone,
    PlacedPicture,
    SampledCandidates,
    ScoredTokens,
    SequenceStep,
    Step,
    TokenHistory,
)
from moonpool.engine import messages
from moonpool.engine.remote.messages import TO_LEADER, TO_STAGE, KVSlice, SlotChanges
from moonpool.engine.remote.schema import Schema, SchemaError

LAYOUT = KVLayout.uniform(layers=4, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
PARAMS = SamplingParams(
    temperature=0.5, stop=("a", "b"), stop_token_ids=(3,), seed=(1 << 64) - 1, logit_bias={7: -1.5}, logprobs=2,
    response_format="json_schema", grammar='{"type": "object"}', early_stopping="never",
)  # fmt: skip
SEQUENCE = SequenceStep(
    array("i", range(40)).tobytes(), 16, (4, 1, 6, 9),
    SampleSpec(PARAMS, seed=(1 << 64) - 2, history=b"abcd", banned=(1, 2), forced=5), ScoredTokens(b"\0\0\0\1", 3),
    full_hit=True, end_token_ids=frozenset({2, 3}), lora=b"x" * 32,
    media=(MediaItem(1, 5, b"d" * 32, b"picture", 3, 4, "low"),), picture_rows={b"d" * 32: b"rows"},
)  # fmt: skip
DONE = messages.StageDone(
    7, 1, (5, None), False, 1 << 60, -3, several={0: SampledCandidates((5, 6), (-0.5, -1.0))},
    logprobs={0: Logprobs(array("f", [-0.5]), array("I", [1]), array("i", [5]), array("f", [-0.5]))},
    embeddings={1: b"\0" * 8}, failed={1: "no token"}, late=frozenset({1}),
    pictures=(PlacedPicture(0, 9, "memory", 5, b"d" * 32, b"rows"),),
    earlier=(messages.StageDone(6, 1, (4,), False, 0, 1, over=False),),
)  # fmt: skip
ORDERS = [
    messages.StageSpec(messages.EngineSpec("/model", "bfloat16", LAYOUT, 9, stages=2), 1, 0, 2, 4, ""),
    messages.EngineSizes(9, 512, "memory"),
    Step(7, (SEQUENCE, SEQUENCE), gated=True, copies=((1, 2), (3, 4)), steps=1 << 40),
    messages.OpenKVGateMessage(7, 3),
    messages.FetchBlocks(2, (1, 2, 3)),
    messages.LoadLora(4, b"id", "/folder"),
    messages.HiddenStates(7, 3, b"\1" * 24),
    KVSlice(3, 8, (1 << 64) - 1, True, b"\2" * 64),
    SlotChanges(((3, -1), (4, 2))),
    messages.Shutdown(),
]
EVENTS = [
    DONE,
    messages.StageTokens(DONE),
    LayerDone(7, 2, 5, 6),
    messages.WorkerFailed("no", "ConfigError", "device"),
    messages.LoraAnswer(4, 1, 100, messages.WorkerFailed("no")),
    messages.WorkerReady(0.5, 9, messages.Footprint(1, 2, 3, 4, 5, messages.DeviceFootprint(1, 2, 3, 4)), "kernels"),
]
ALL = [*((TO_STAGE, order) for order in ORDERS), *((TO_LEADER, event) for event in EVENTS)]


@pytest.mark.parametrize(("schema", "message"), ALL, ids=[type(message).__name__ for _, message in ALL])
def test_what_is_sent_arrives(schema: Schema, message: Any) -> None:
    assert schema.decode(schema.encode(message)) == message


def test_a_history_stays_on_its_host() -> None:
    history = TokenHistory(b"root", array("i", [1]), ())  # type: ignore[arg-type]
    step = Step(1, (dataclasses.replace(SEQUENCE, history=history),))
    assert TO_STAGE.decode(TO_STAGE.encode(step)).sequences[0].history is None


@pytest.mark.parametrize(("schema", "message"), ALL, ids=[type(message).__name__ for _, message in ALL])
def test_changed_bytes_are_a_message_or_refused(schema: Schema, message: Any) -> None:
    """Nothing else happens: no other error, and no more memory than bytes."""
    draws, data = random.Random(5), schema.encode(message)
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(draws.randrange(1, 4)):
            changed[draws.randrange(len(changed))] = draws.randrange(256)
        cut = changed[: draws.randrange(len(changed) + 1)] if draws.random() < 0.3 else changed
        try:
            found = schema.decode(bytes(cut))
        except SchemaError:
            continue
        assert dataclasses.is_dataclass(found)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "1 bytes are wanted"),
        (b"\xff", "unknown kind 255"),
        (pickle.dumps(messages.Shutdown()), "unknown kind 128"),
        (TO_LEADER.encode(DONE) + b"\0", "StageDone: ends at byte"),
        (TO_LEADER.encode(DONE)[:-1], "StageDone: "),
    ],
)
def test_other_bytes_are_refused_by_name(data: bytes, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        TO_LEADER.decode(data)


def test_values_that_a_class_refuses_are_no_message() -> None:
    spec = TO_STAGE.encode(ORDERS[0])
    (at,) = [at for at in range(len(spec)) if spec[at : at + 2] == b"\1\x10"][:1]  # the layout's block size
    with pytest.raises(SchemaError, match=r"StageSpec: ConfigError: block_size"):
        TO_STAGE.decode(spec[: at + 1] + b"\x11" + spec[at + 2 :])


def test_another_build_has_another_fingerprint() -> None:
    @dataclasses.dataclass
    class Ping:
        sent_ns: int

    wanted = Schema((Ping,)).fingerprint

    @dataclasses.dataclass
    class Changed:
        sent_ns: float

    Changed.__name__ = "Ping"
    assert Schema((Changed,)).fingerprint != wanted
