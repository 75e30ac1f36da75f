"""Opens a stage's device, with the KV memory in which the stage's steps compute."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from moonpool.base.kv.pool import PoolPart
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.platforms.base import Device, DeviceStream
from moonpool.engine.platforms.callback_thread import CallbackThread
from moonpool.engine.platforms.cpu import CpuKVMemory, CpuStream
from moonpool.engine.platforms.kv_memory import KVMemory, TieredKVMemory
from moonpool.engine.platforms.registry import DeviceName


@dataclass(frozen=True, slots=True)
class StagePlatform:
    """Where a stage computes.

    Attributes:
        torch_device: for weights and batches.
        stream: compute stream for steps.
        memory: the stage's KV.
        callbacks: thread that calls what follows from a layer, while other layers are computed.
        device: None on a plain CPU.
    """

    torch_device: torch.device
    stream: DeviceStream
    memory: KVMemory
    callbacks: CallbackThread
    device: Device | None = None

    def close(self) -> None:
        """Wait for the work under way, and end the threads."""
        self.memory.close()
        self.callbacks.close()
        if self.device is not None:
            self.device.close()


def open_device(name: DeviceName) -> Device | None:
    """Return the device; None for a platform that computes in the host's pool.

    Raises:
        ConfigError: there is no such platform or device here; names the field `device`.
    """
    if name.platform.in_host_pool:
        return None
    module, _, opener = name.platform.device.partition(":")
    device: Device = getattr(import_module(module), opener)(name.number)
    return device


def stage_platform(
    device: Device | None,
    part: PoolPart,
    on_failure: Callable[[BaseException], None],
    beside: int = 0,
    ranks: Ranks | None = None,
) -> StagePlatform:
    """Return the platform of a stage.

    Args:
        device: None: a plain CPU.
        part: the stage's part of the pool.
        on_failure: called from another thread, once, if a callback of a layer has failed.
        beside: bytes that stay free on the device, for steps.
        ranks: this process among the stage's ranks; None: there are no others.

    Raises:
        ConfigError: the device has no room for the KV.
    """
    if device is None:
        return StagePlatform(torch.device("cpu"), CpuStream(), CpuKVMemory(part, ranks), CallbackThread(on_failure))
    callbacks = CallbackThread(on_failure, device.enter_thread)
    memory = TieredKVMemory(part, device, callbacks, beside=beside, ranks=ranks)
    return StagePlatform(device.torch_device, device.compute, memory, callbacks, device)
