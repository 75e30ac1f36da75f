"""Callback threads, the streams of a CPU that behaves like a GPU, and names of devices."""

from functools import partial

import pytest

from moonpool.errors import ConfigError
from moonpool.platforms.kv_memory import CallbackThread
from moonpool.platforms.registry import DeviceName
from moonpool.platforms.stage_platform import open_device
from moonpool.platforms.staged import StagedDevice


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
    assert [it for it in done if it < 10] == [0, 1, 2, 3]
    assert [it for it in done if it >= 10] == [10, 11, 12, 13]
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


def test_names() -> None:
    assert DeviceName.parse("cpu") == DeviceName("cpu", 0)
    assert DeviceName.parse("staged:7").of_stage(2) == DeviceName("staged", 9)
    assert DeviceName.parse("cuda").of_stage(1) == DeviceName("cuda", 1)
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
