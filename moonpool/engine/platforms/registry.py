"""The platforms that an engine can compute on, by the names that flags and specifications use. Torch-free.

A new device is an entry in `PLATFORMS` and a module with a `moonpool.engine.platforms.base.Device`;
docs/extend/device.md lists the steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from moonpool.base.errors import ConfigError

MEMORY_SHARE = 0.9
"""Of a GPU's memory, what engines take together, by default."""
HOST_COLLECTIVES = "gloo"
"""The `torch.distributed` backend that sends from the host's memory: every platform can use this backend."""
_SEPARATOR = ","
"""Between the devices of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What the engine asks about a kind of device before opening such a device."""

    kind: str
    usage: str
    """How a flag names such a device, and the device's description."""
    sized_by_memory: bool
    """Whether sizes that no flag gives follow from the device's memory, which `Device.capacity` tells; else the pool is
    small, as on a host whose memory other programs need. Without a default: each platform says so."""
    device: str = ""
    """"MODULE:CLASS" for the `Device`, called with the device's number; "" computes in the host's pool."""
    numbered: bool = True
    """Whether a name may end with a number; for one name, further ranks and stages take the next numbers."""
    collectives: str = HOST_COLLECTIVES
    """Backend of `torch.distributed` between stages, and between ranks, on different devices."""
    uses_host_cores: bool = True
    """Whether steps compute on the host's cores, which a host's engines lend each other."""

    @property
    def in_host_pool(self) -> bool:
        """Whether steps compute in the host's KV pool, so that no block needs to be fetched."""
        return not self.device


PLATFORMS: dict[str, Platform] = {
    platform.kind: platform
    for platform in (
        Platform(kind="cpu", usage="cpu", numbered=False, sized_by_memory=False),
        Platform(
            kind="staged",
            usage="staged or staged:SEED (a CPU that orders work as a GPU might, for tests)",
            device="moonpool.engine.platforms.staged:StagedDevice",
            sized_by_memory=False,
        ),
        Platform(
            kind="cuda",
            usage="cuda or cuda:NUMBER (a GPU)",
            device="moonpool.engine.platforms.cuda:CudaDevice",
            collectives="nccl",
            uses_host_cores=False,
            sized_by_memory=True,
        ),
    )
}
"""By kind."""

DEVICE_USAGE = "; ".join(platform.usage for platform in PLATFORMS.values())
"""All names of devices, for help texts."""


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device, as flags and specifications write it: KIND or KIND:NUMBER, with a kind of `PLATFORMS`."""

    kind: str
    number: int = 0
    """Of a GPU; for `staged`, the seed for the order."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a flag's value.

        Raises:
            ConfigError: there is no such device; names the field `device`.
        """
        kind, colon, number = text.partition(":")
        platform = PLATFORMS.get(kind)
        if platform is None or (colon and not (platform.numbered and number.isdecimal())):
            raise ConfigError("device", f"{text!r} is none of: {DEVICE_USAGE}")
        return cls(kind, int(number or 0))

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}" if self.platform.numbered else self.kind

    @property
    def platform(self) -> Platform:
        """The platform of this device.

        Raises:
            ConfigError: there is no such platform; names the field `device`.
        """
        if self.kind not in PLATFORMS:
            raise ConfigError("device", f"{self.kind!r} is none of {', '.join(PLATFORMS)}")
        return PLATFORMS[self.kind]

    def next(self, count: int) -> Self:
        """Return the device `count` numbers further; the same device of a platform without numbers."""
        return type(self)(self.kind, self.number + count if self.platform.numbered else 0)


def engine_devices(names: str, stages: int, ranks: int = 1) -> tuple[tuple[DeviceName, ...], ...]:
    """Return the devices of each pipeline stage, one for each of its ranks, as a flag names them.

    A single name is the first rank's device in the first stage, and further ranks, then further stages, are on the next
    devices. Names with commas between them are those of all ranks, stage by stage. Ranks and stages may share a device.

    Raises:
        ConfigError: there is no such device, a rank has none or more than one, or kinds differ; names the field
            `device`.
    """
    devices = [DeviceName.parse(name) for name in names.split(_SEPARATOR)]
    if len(devices) == 1:
        devices = [devices[0].next(number) for number in range(stages * ranks)]
    if len(devices) != stages * ranks:
        each = "" if ranks == 1 else f" with {ranks} ranks each"
        raise ConfigError("device", f"{names!r} names {len(devices)} devices for {stages} pipeline stages{each}")
    if len({device.kind for device in devices}) > 1:
        raise ConfigError("device", f"{names!r}: an engine computes on devices of one kind")
    return tuple(tuple(devices[begin : begin + ranks]) for begin in range(0, len(devices), ranks))


def engine_platform(names: str) -> Platform:
    """Return the platform of an engine's devices, as a flag names them.

    Raises:
        ConfigError: there is no such device; names the field `device`.
    """
    return DeviceName.parse(names.partition(_SEPARATOR)[0]).platform


def collectives_of(devices: Sequence[DeviceName], available: Callable[[str], bool] = lambda backend: True) -> str:
    """Return the backend of `torch.distributed` that sends tensors between stages or ranks on these devices.

    The platform's own backend needs a device for each: NCCL refuses two processes on one GPU.

    Args:
        devices: of the stages, or of a stage's ranks, with one kind.
        available: whether torch has a backend.
    """
    wanted = devices[0].platform.collectives
    return wanted if len(set(devices)) == len(devices) and available(wanted) else HOST_COLLECTIVES
