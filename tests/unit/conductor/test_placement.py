from dataclasses import replace

import pytest

from moonpool.cost import Speeds
from services.conductor.inflight import DecodesInFlight, PrefillsInFlight
from services.conductor.placement import (
    DecodeView,
    Demand,
    PrefillView,
    Shape,
    rank_decodes,
    rank_prefills,
)
from services.conductor.stores import StoreView

SHAPE = Shape(block_tokens=16, token_bytes=10, layers=1)
SECOND_PER_TOKEN = Speeds(prefill_per_token_s=1.0, load_bytes_per_s=100.0, transfer_bytes_per_s=100.0)
DEMAND = Demand(prompt_tokens=64, prompt_blocks=4, total_blocks=5, decode_tokens=10)


def prefill(name: str, *, queue_s: float = 0.0, local: int = 0, speeds: Speeds = SECOND_PER_TOKEN) -> PrefillView:
    return PrefillView(id=name, speeds=speeds, queue_s=queue_s, local_blocks=local, total_blocks=100)


def test_a_cached_prefix_wins_until_its_queue_is_longer_than_computing() -> None:
    near, far = prefill("cached", queue_s=31.0, local=2), prefill("idle")
    ranked = rank_prefills(DEMAND, SHAPE, [far, near], [], 1.0)
    assert [choice.id for choice in ranked] == ["cached", "idle"]
    assert (ranked[0].ttft_s, ranked[1].ttft_s) == (31.0 + 32.0, 64.0)
    near = prefill("cached", queue_s=33.0, local=2)
    assert rank_prefills(DEMAND, SHAPE, [far, near], [], 1.0)[0].id == "idle"


def test_the_last_token_is_always_computed() -> None:
    best = rank_prefills(DEMAND, SHAPE, [prefill("a", local=4)], [], 1.0)[0]
    assert best.prefill_s == 1.0


def test_a_stored_prefix_is_loaded_where_that_is_cheaper() -> None:
    store = StoreView("store", 3)
    best = rank_prefills(DEMAND, SHAPE, [prefill("a", local=1)], [store, StoreView("other", 1)], 1.0)[0]
    assert (best.kvstore, best.used_blocks, best.prefill_s) == ("store", 3, 16.0)
    assert best.load_s == pytest.approx(3.2)
    slow = Speeds(prefill_per_token_s=1.0, load_bytes_per_s=1.0)
    best = rank_prefills(DEMAND, SHAPE, [prefill("a", local=1, speeds=slow)], [store], 1.0)[0]
    assert (best.kvstore, best.used_blocks, best.load_s, best.prefill_s) == ("", 1, 0.0, 48.0)


def test_the_balancing_threshold_keeps_a_local_prefix_that_is_nearly_as_long() -> None:
    view, store = prefill("a", local=2), StoreView("store", 3)
    assert rank_prefills(DEMAND, SHAPE, [view], [store], 1.0)[0].kvstore == "store"
    assert rank_prefills(DEMAND, SHAPE, [view], [store], 1.5)[0].kvstore == ""
    assert rank_prefills(DEMAND, SHAPE, [prefill("a")], [store], 1000.0)[0].kvstore == "store"


def test_equals_take_turns_and_suspects_come_last() -> None:
    views = [
        PrefillView("a", SECOND_PER_TOKEN, 0.0, 4, 100, suspect=True),
        PrefillView("b", SECOND_PER_TOKEN, 0.0, 0, 100, placed=2),
        PrefillView("c", SECOND_PER_TOKEN, 0.0, 0, 100, placed=1),
        PrefillView("d", SECOND_PER_TOKEN, 0.0, 4, 100, draining=True),
        PrefillView("e", SECOND_PER_TOKEN, 0.0, 4, 3),
    ]
    ranked = rank_prefills(DEMAND, SHAPE, views, [], 1.0)
    assert [(choice.id, choice.excluded) for choice in ranked] == [
        ("c", ""),
        ("b", ""),
        ("a", ""),
        ("d", "draining"),
        ("e", "too small: 3 blocks, the prompt needs 4"),
    ]


def decode(name: str, *, sequences: int = 0, room: int = 50, held: int = 0, total: int = 50) -> DecodeView:
    speeds = Speeds(decode_base_s=1.0, decode_per_sequence_s=0.5, transfer_bytes_per_s=10.0)
    return DecodeView(name, speeds, sequences, 0, room, total, held)


def test_decode_weighs_load_against_the_kv_it_holds() -> None:
    ranked = rank_decodes(DEMAND, SHAPE, [decode("idle"), decode("holds", sequences=1, held=4)])
    assert [(c.id, c.tbt_s, c.finish_s) for c in ranked] == [("holds", 2.0, 20.0), ("idle", 1.5, 64.0 + 15.0)]


def test_decode_without_room_comes_last_and_one_too_small_never() -> None:
    ranked = rank_decodes(DEMAND, SHAPE, [decode("full", room=4), decode("busy", sequences=9), decode("tiny", total=4)])
    assert [choice.id for choice in ranked] == ["busy", "full"]


def test_prefills_in_flight_are_worked_off_in_order() -> None:
    flight = PrefillsInFlight()
    flight.begin("a", 4.0, now=10.0)
    flight.begin("b", 2.0, now=11.0)
    assert flight.queue_seconds(11.0) == 5.0
    assert flight.queue_seconds(99.0) == 2.0  # late, but b has not begun
    flight.end("a", now=12.0)
    assert flight.queue_seconds(13.0) == 1.0
    flight.end("a", now=13.0)
    flight.end("b", now=13.0)
    assert flight.queue_seconds(13.0) == 0.0
    assert len(flight) == 0


def test_decodes_in_flight_are_counted_until_reported() -> None:
    flight = DecodesInFlight()
    flight.begin("a", 100, 8)
    flight.begin("b", 50, 4)
    assert (flight.total_context_tokens(), flight.total_unreported_blocks()) == (150, 12)
    flight.reported()
    assert (flight.total_context_tokens(), flight.total_unreported_blocks()) == (150, 0)
    flight.end("a")
    flight.end("a")
    assert (len(flight), flight.total_context_tokens()) == (1, 50)


def test_an_instance_that_looked_slow_is_tried_again_in_the_end() -> None:
    step = Speeds(decode_base_s=0.01, transfer_bytes_per_s=1e12)
    slow = replace(step, decode_base_s=0.05)

    def first(passed_over: int) -> str:
        views = [
            DecodeView(id="a", speeds=step, sequences=1, context_tokens=0, room_blocks=9, total_blocks=9),
            DecodeView("b", slow, 0, 0, room_blocks=9, total_blocks=9, passed_over=passed_over),
        ]
        return rank_decodes(DEMAND, SHAPE, views)[0].id

    # Five times the best is within the noise once 4 * 0.95**n <= 0.5.
    assert [first(count) for count in (0, 40, 41)] == ["a", "a", "b"]
