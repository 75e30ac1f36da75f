"""Names of devices, as flags and specifications write them. Torch-free."""

from dataclasses import dataclass
from typing import Self

from moonpool.errors import ConfigError

KINDS = ("cpu", "staged", "cuda")


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device: `cpu`, `staged` (a CPU that pretends to be a GPU), `cuda`; `KIND:NUMBER` says which one."""

    kind: str
    number: int = 0
    """Of a GPU; of `staged` the seed of its order."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From a flag's value.

        Raises:
            ConfigError: there is no such device; names the field `device`.
        """
        kind, colon, number = text.partition(":")
        if kind not in KINDS or (colon and (kind == "cpu" or not number.isdecimal())):
            raise ConfigError("device", f"must be cpu, staged, staged:SEED, cuda or cuda:NUMBER, not {text!r}")
        return cls(kind, int(number or 0))

    def of_stage(self, stage: int) -> Self:
        """The device of a stage: each has a GPU, or an order, of its own, counted from this one."""
        return type(self)(self.kind, self.number + stage if self.kind != "cpu" else 0)
