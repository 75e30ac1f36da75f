import threading

from moonpool.engine.kv_gate import KVGates


def test_a_gate_opens_all_layers_below() -> None:
    gates = KVGates()
    gates.open(1, 2)
    gates.open(1, 0)  # older news
    assert [gates.wait(1, layer, 0) for layer in range(3)] == [True, True, True]


def test_a_gate_that_stays_shut_aborts_the_step() -> None:
    gates = KVGates()
    gates.open(1, 0)
    assert not gates.aborted(1)
    assert not gates.wait(1, 1, 0)
    assert gates.aborted(1)
    gates.open(1, 5)
    assert not gates.wait(1, 1, 0)  # what is given up stays so


def test_steps_do_not_open_each_others_gates() -> None:
    gates = KVGates()
    gates.open(2, 5)
    assert not gates.wait(1, 0, 0)
    assert gates.wait(2, 0, 0)


def test_what_is_said_of_a_later_step_is_kept_and_of_an_earlier_one_ignored() -> None:
    gates = KVGates()
    gates.abort(3)
    gates.open(4, 1)
    gates.abort(2)
    gates.done(2)
    assert not gates.aborted(2)
    assert gates.aborted(3)
    gates.done(3)
    gates.abort(3)
    gates.open(1, 9)
    assert not gates.aborted(3)
    assert gates.wait(4, 1, 0)
    gates.done(4)
    assert len(gates) == 0


def test_dropped_shares_are_forgotten_with_their_step() -> None:
    gates = KVGates()
    gates.drop(1, 2)
    gates.drop(1, 0)
    gates.drop(2, 1)
    assert sorted(gates.dropped(1)) == [0, 2]
    assert not gates.dropped(3)
    gates.done(1)
    gates.drop(1, 1)
    assert not gates.dropped(1)
    assert sorted(gates.dropped(2)) == [1]
    gates.done(2)
    assert len(gates) == 0


def test_waiting_ends_when_another_thread_opens_or_aborts() -> None:
    gates = KVGates()
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.extend(gates.wait(1, layer, 30) for layer in range(2)))
    thread.start()
    gates.open(1, 0)
    gates.abort(1)
    thread.join(60)
    assert results[-1] is False


def test_a_watch_shows_what_happens_to_its_step_from_then_on() -> None:
    gates = KVGates()
    gates.open(1, 1)
    signals = gates.signals(1, gated=True)
    assert [signals.stopped(layer) for layer in (0, 1, 2)] == [False, False, True]
    gates.open(1, 4)
    gates.open(1, 2)  # older news
    assert [signals.stopped(layer) for layer in (2, 4, 5)] == [False, False, True]
    gates.open(2, 9)
    gates.abort(2)
    assert [signals.stopped(layer) for layer in (4, 5)] == [False, True]
    gates.abort(1)
    assert signals.stopped(0)


def test_without_gates_only_an_abort_stops_and_one_that_came_before_counts() -> None:
    gates = KVGates()
    free = gates.signals(1, gated=False)
    assert not free.stopped(1000)
    assert not gates.wait(1, 0, 0)  # nobody opened it in time: given up
    assert free.stopped(0)
    gates.abort(2)
    assert gates.signals(2, gated=False).stopped(0)
    gates.done(2)
    assert not gates.signals(3, gated=False).stopped(0)
