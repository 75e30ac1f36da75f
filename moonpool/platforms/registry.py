"""The platforms that an engine can compute on, by the names that flags and specifications use. Torch-free.

A new device is an entry of `PLATFORMS` and a module with its `moonpool.platforms.base.Device`; docs/extend/device.md
lists the steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from moonpool.errors import ConfigError

HOST_COLLECTIVES = "gloo"
"""The backend of `torch.distributed` that sends from the host's memory: every platform can use it."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What the engine asks about a kind of device before it opens one."""

    kind: str
    usage: str
    """How a flag names such a device, and what it is."""
    device: str = ""
    """"MODULE:CLASS" of its `Device`, called with the device's number; "" computes in the host's pool itself."""
    numbered: bool = True
    """Whether a name may end with a number; further pipeline stages then take the next numbers."""
    collectives: str = HOST_COLLECTIVES
    """Backend of `torch.distributed` that sends hidden states between stages, where torch has it."""
    uses_host_cores: bool = True
    """Whether steps compute on the host's cores, which engines of one host lend each other."""

    @property
    def in_host_pool(self) -> bool:
        """Whether steps compute in the host's KV pool itself, so that no block needs to be fetched."""
        return not self.device


PLATFORMS: Mapping[str, Platform] = {
    it.kind: it
    for it in (
        Platform("cpu", "cpu", numbered=False),
        Platform(
            "staged",
            "staged or staged:SEED (a CPU that orders its work as a GPU might, for tests)",
            "moonpool.platforms.staged:StagedDevice",
        ),
        Platform(
            "cuda",
            "cuda or cuda:NUMBER (a GPU; experimental, untested on a GPU)",
            "moonpool.platforms.cuda:CudaDevice",
            collectives="nccl",
            uses_host_cores=False,
        ),
    )
}
"""By kind."""

DEVICE_USAGE = "; ".join(it.usage for it in PLATFORMS.values())
"""All names of devices, for help texts."""


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device, as flags and specifications write it: KIND or KIND:NUMBER, with a kind of `PLATFORMS`."""

    kind: str
    number: int = 0
    """Of a GPU; of `staged` the seed of its order."""

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

    @property
    def platform(self) -> Platform:
        """The platform of this device.

        Raises:
            ConfigError: there is no such platform; names the field `device`.
        """
        if self.kind not in PLATFORMS:
            raise ConfigError("device", f"{self.kind!r} is none of {', '.join(PLATFORMS)}")
        return PLATFORMS[self.kind]

    def of_stage(self, stage: int) -> Self:
        """Return the device of a pipeline stage, counted from this one: each stage has a GPU, or a seed, of its own."""
        return type(self)(self.kind, self.number + stage if self.platform.numbered else 0)
