"""Opens a stage's device, with the KV that it computes with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moonpool.engine.devices.courier import Courier
from moonpool.engine.devices.cuda import CudaDevice
from moonpool.engine.devices.lanes import Device, Immediate, Lane
from moonpool.engine.devices.memory import KVMemory, OnePool
from moonpool.engine.devices.names import DeviceName
from moonpool.engine.devices.staged import StagedDevice
from moonpool.engine.devices.tiers import TwoTiers
from moonpool.kv.pool import PoolPart


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage computes.

    Attributes:
        torch_device: of weights and batches.
        lane: of its steps.
        memory: its KV.
        courier: does what follows from its layers, while others are computed.
        device: None on a plain CPU.
    """

    torch_device: torch.device
    lane: Lane
    memory: KVMemory
    courier: Courier
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


def place_on(
    device: Device | None, part: PoolPart, on_failure: Callable[[BaseException], None], beside: int = 0
) -> Place:
    """The place of a stage on its device.

    Args:
        device: None = a plain CPU.
        part: its share of the pool.
        on_failure: called, from another thread, when what follows from a layer cannot be done any more.
        beside: bytes that are left free on the device, for steps.

    Raises:
        ConfigError: the device has no room for the KV.
    """
    courier = Courier(on_failure)
    if device is None:
        return Place(torch.device("cpu"), Immediate(), OnePool(part), courier)
    memory = TwoTiers(part, device, courier, beside=beside)
    return Place(device.torch_device, device.compute, memory, courier, device)
