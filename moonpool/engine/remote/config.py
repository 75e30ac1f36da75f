"""Flags of a stage on another host than its leader."""

import os
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from moonpool.base.config import OptionalAddress, ServiceConfig, check_peer, format_address
from moonpool.base.errors import ConfigError
from moonpool.engine.platforms.registry import DEVICE_USAGE
from moonpool.engine.remote.group_place import VARIABLES, read_place


class StageConfig(ServiceConfig):
    """Runs one pipeline stage of an instance whose first stages are on another host."""

    flag_groups: ClassVar = {
        "leader": ("leader", "node_rank"),
        "model": ("model",),
        "compute": ("device", "threads"),
    }
    service_name: ClassVar[str | None] = "stage"
    leader: OptionalAddress = Field(
        "",
        description="HOST:PORT where the instance with the first stages listens for stages (stages_listen); "
        f"default: as {', '.join(VARIABLES)} say",
    )
    node_rank: int = Field(
        0,
        ge=0,
        description="which of the hosts this is: 1 = the first after the leader's; 0 = as the variables say",
    )
    model: str = Field(description="the checkpoint's folder, GGUF file, or Hugging Face hub id: the leader's weights")
    device: str = Field("cpu", description=f"where the stage computes: {DEVICE_USAGE}")
    threads: int = Field(
        0, ge=0, description="compute threads of each engine process at most; 0 = an equal part of the cores for each"
    )

    def place(self, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
        """Return the leader's "host:port" and this host's node rank.

        Raises:
            ConfigError: naming a setting or a variable: one is missing or wrong.
        """
        leader, node_rank = self.leader, self.node_rank
        if not leader or not node_rank:
            found = read_place(environment)
            if found is None:
                lacking = "node_rank" if leader else "leader"
                raise ConfigError(lacking, f"must be given, or one of the variables {', '.join(VARIABLES)}")
            leader = leader or format_address(found.leader, found.port)
            node_rank = node_rank or found.node_rank
        if not node_rank:
            raise ConfigError("node_rank", "must be at least 1: 0 is the leader, which is a prefill instance")
        try:
            return check_peer(leader), node_rank
        except ValueError as error:
            raise ConfigError("leader", str(error)) from None
