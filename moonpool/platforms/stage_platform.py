"""Opens a stage's device, with the KV memory its steps compute in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moonpool.kv.pool import PoolPart
from moonpool.platforms.cpu import CpuKVMemory, CpuStream
from moonpool.platforms.cuda import CudaDevice
from moonpool.platforms.interface import Device, DeviceStream
from moonpool.platforms.kv_memory import CallbackThread, KVMemory, TieredKVMemory
from moonpool.platforms.names import DeviceName
from moonpool.platforms.staged import StagedDevice


@dataclass(frozen=True, slots=True)
class StagePlatform:
    """Where a stage computes.

    Attributes:
        torch_device: of weights and batches.
        lane: of its steps.
        memory: its KV.
        courier: does what follows from its layers, while others are computed.
        device: None on a plain CPU.
    """

    torch_device: torch.device
    lane: DeviceStream
    memory: KVMemory
    courier: CallbackThread
    device: Device | None = None

    def close(self) -> None:
        """Waits for what is under way, and ends its threads."""
        self.courier.close()
        if self.device is not None:
            self.device.close()


def open_device(name: DeviceName) -> Device | None:
    """The device; None for a plain CPU.

    Raises:
        ConfigError: it is not here.
    """
    if name.kind == "cpu":
        return None
    return StagedDevice(name.number) if name.kind == "staged" else CudaDevice(name.number)


def stage_platform(
    device: Device | None, part: PoolPart, on_failure: Callable[[BaseException], None], beside: int = 0
) -> StagePlatform:
    """The place of a stage on its device.

    Args:
        device: None = a plain CPU.
        part: its share of the pool.
        on_failure: called, from another thread, when what follows from a layer cannot be done any more.
        beside: bytes that are left free on the device, for steps.

    Raises:
        ConfigError: the device has no room for the KV.
    """
    courier = CallbackThread(on_failure)
    if device is None:
        return StagePlatform(torch.device("cpu"), CpuStream(), CpuKVMemory(part), courier)
    memory = TieredKVMemory(part, device, courier, beside=beside)
    return StagePlatform(device.torch_device, device.compute, memory, courier, device)
