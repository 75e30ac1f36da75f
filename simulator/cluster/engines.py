"""The engines of a cluster: prefill and decode instances by name, also those that are not there now."""

from collections.abc import Iterator

from moonpool.frozen import frozen
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.prefill import PrefillInstance


@frozen
class Engines:
    """Prefill instances are called "p0", "p1" and so on, decode instances "d0"."""

    prefills: dict[str, PrefillInstance]
    decodes: dict[str, DecodeInstance]

    def __iter__(self) -> Iterator[PrefillInstance | DecodeInstance]:
        """Prefill instances first."""
        yield from self.prefills.values()
        yield from self.decodes.values()

    def __getitem__(self, name: str) -> PrefillInstance | DecodeInstance:
        return self.prefills[name] if name in self.prefills else self.decodes[name]
