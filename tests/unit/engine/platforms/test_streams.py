"""Callback threads, the streams of a CPU that behaves like a GPU, and names of devices."""

from functools import partial

import pytest
import torch

from moonpool.base.errors import ConfigError
from moonpool.engine.platforms.callback_thread import CallbackThread
from moonpool.engine.platforms.registry import DeviceName, collectives_of, engine_devices, engine_platform
from moonpool.engine.platforms.stage_platform import open_device
from moonpool.engine.platforms.staged import StagedDevice


def test_a_callback_thread_that_fails_says_so_and_does_nothing_more() -> None:
    said: list[BaseException] = []
    done: list[int] = []
    callbacks, error = CallbackThread(said.append), ValueError("no")

    def fail() -> None:
        raise error

    calls = [callbacks.send(lambda: done.append(1)), callbacks.send(fail), callbacks.send(lambda: done.append(2))]
    calls[0].over.wait()
    for call in calls[1:]:
        with pytest.raises(ValueError, match="no"):
            call.wait()
    callbacks.close()
    assert (said, done) == ([error], [1])


def test_what_a_stream_raises_is_raised_to_who_waits() -> None:
    device = StagedDevice(1)
    device.compute.run(lambda: dict[str, None]().pop("missing"))
    with pytest.raises(KeyError):
        device.compute.record().wait()
    device.close()


@pytest.mark.parametrize("seed", range(6))
def test_streams_keep_their_own_order_and_wait_for_events(seed: int) -> None:
    device, done = StagedDevice(seed), list[int]()
    for number in range(4):
        device.compute.run(partial(done.append, number))
        device.load_stream.wait_event(device.compute.record())
        device.load_stream.run(partial(done.append, 10 + number))
    device.load_stream.record().wait()
    assert [work_ for work_ in done if work_ < 10] == [0, 1, 2, 3]
    assert [work_ for work_ in done if work_ >= 10] == [10, 11, 12, 13]
    assert all(done.index(number) < done.index(10 + number) for number in range(4))
    device.close()


def test_lazy_work_is_not_done_before_somebody_waits() -> None:
    """Which seeds are lazy in which stream is the device's own; some are, and some are not."""
    early = set()
    for seed in range(20):
        device, done = StagedDevice(seed), list[int]()
        device.load_stream.run(partial(done.append, 1))
        early.add(len(done))
        device.load_stream.record().wait()
        assert done == [1]
        device.close()
    assert early == {0, 1}


def test_a_thread_that_has_not_entered_a_device_is_refused() -> None:
    device, said = StagedDevice(1), list[BaseException]()
    event = device.store_stream.record()
    for enter, refused in ((device.enter_thread, False), (lambda: None, True)):
        callbacks = CallbackThread(said.append, enter)
        waits = callbacks.send(event.wait)
        waits.over.wait()
        callbacks.close()
        assert bool(said) == refused
    assert str(said[0]) == "callbacks has not entered the device"
    device.close()


def test_memory_that_is_not_registered_is_refused() -> None:
    device, host = StagedDevice(1), torch.zeros(2, 3, dtype=torch.uint8)
    there = device.memory((2, 3), 0)
    device.load_stream.run(partial(device.copy_slices, there, host, torch.tensor([1])))
    with pytest.raises(AssertionError, match="memory is not registered"):
        device.load_stream.record().wait()
    device.close()


def test_a_thread_that_cannot_enter_makes_no_call() -> None:
    said: list[BaseException] = []
    callbacks = CallbackThread(said.append, partial(dict[str, None]().pop, "missing"))
    with pytest.raises(KeyError):
        callbacks.send(lambda: said.clear()).wait()
    callbacks.close()
    assert len(said) == 1


def test_names() -> None:
    assert DeviceName.parse("cpu") == DeviceName("cpu", 0)
    assert open_device(DeviceName("cpu")) is None
    for wrong in ("", "gpu", "cpu:1", "cuda:", "cuda:a", "cuda:-1", "staged:1:2"):
        with pytest.raises(ConfigError) as caught:
            DeviceName.parse(wrong)
        assert caught.value.field == "device"


def test_a_kind_that_is_not_registered_is_refused() -> None:
    for ask in (open_device, lambda name: name.platform):
        with pytest.raises(ConfigError) as caught:
            ask(DeviceName("tpu"))
        assert caught.value.field == "device"


def names(*devices: tuple[str, int]) -> tuple[DeviceName, ...]:
    return tuple(DeviceName(kind, number) for kind, number in devices)


def chain_of(text: str, stages: int) -> tuple[DeviceName, ...]:
    return tuple(name for (name,) in engine_devices(text, stages))


def test_stages_are_on_the_next_devices_or_on_those_that_are_named() -> None:
    assert chain_of("cpu", 2) == names(("cpu", 0), ("cpu", 0))
    assert chain_of("staged:7", 3) == names(("staged", 7), ("staged", 8), ("staged", 9))
    assert chain_of("cuda", 2) == names(("cuda", 0), ("cuda", 1))
    assert chain_of("cuda:1,cuda:0", 2) == names(("cuda", 1), ("cuda", 0))
    assert chain_of("cuda:0,cuda", 2) == names(("cuda", 0), ("cuda", 0))


def test_ranks_are_on_the_next_devices_stage_by_stage_or_on_those_that_are_named() -> None:
    assert engine_devices("cuda", 2, 2) == (names(("cuda", 0), ("cuda", 1)), names(("cuda", 2), ("cuda", 3)))
    assert engine_devices("cuda:3,cuda:1", 1, 2) == (names(("cuda", 3), ("cuda", 1)),)
    assert engine_devices("cpu", 1, 2) == (names(("cpu", 0), ("cpu", 0)),)
    with pytest.raises(ConfigError, match="names 2 devices for 2 pipeline stages with 2 ranks each"):
        engine_devices("cuda:0,cuda:1", 2, 2)
    assert [str(name) for (name,) in engine_devices("cuda:3", 2)] == ["cuda:3", "cuda:4"]
    assert str(DeviceName("cpu")) == "cpu"
    assert engine_platform("cuda:0,cuda:1").kind == "cuda"


@pytest.mark.parametrize(
    ("text", "stages", "said"),
    [
        ("cuda:0,cuda:1", 1, "names 2 devices for 1 pipeline stages"),
        ("cuda:0,cuda:1", 3, "names 2 devices for 3 pipeline stages"),
        ("cuda:0,staged:1", 2, "one kind"),
        ("cuda:0,", 2, "'' is none of"),
        ("cuda:0,gpu", 2, "'gpu' is none of"),
    ],
)
def test_names_that_do_not_fit_the_stages_are_refused(text: str, stages: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        engine_devices(text, stages)
    assert caught.value.field == "device"


@pytest.mark.parametrize(
    ("text", "stages", "torch_has", "backend"),
    [
        ("cuda", 2, {"gloo", "nccl"}, "nccl"),
        ("cuda:3,cuda:1", 2, {"gloo", "nccl"}, "nccl"),
        ("cuda", 2, {"gloo"}, "gloo"),
        ("cuda:0,cuda:0", 2, {"gloo", "nccl"}, "gloo"),
        ("cuda:0,cuda:1,cuda:0", 3, {"gloo", "nccl"}, "gloo"),
        ("cpu", 2, {"gloo", "nccl"}, "gloo"),
        ("staged:1,staged:2", 2, {"gloo", "nccl"}, "gloo"),
    ],
)
def test_tensors_go_from_gpu_to_gpu_if_each_stage_has_its_own(
    text: str, stages: int, torch_has: set[str], backend: str
) -> None:
    assert collectives_of(chain_of(text, stages), torch_has.__contains__) == backend
