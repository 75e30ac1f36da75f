"""The programs of engine instances: settings and services of the roles that one process may have.

A process has one role, or with `either_role` both in turn: then the settings that only one role has are its settings in
that role, and all others hold in both.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from moonpool.base.errors import ConfigError
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.tls import Security
from moonpool.engine.config import EngineConfig
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.decode.service import decode_role, draft_model_of
from moonpool.engine.instance import EngineRole, StartEngine, run_instance
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.prefill.service import prefill_role
from moonpool.engine.remote.listener import StagesListener
from moonpool.engine.start_engine import start_engine

RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, ...] = ("prefill", "decode")
CONFIGS: dict[RoleName, type[EngineConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}


class EngineProcessConfig(PrefillConfig, DecodeConfig):
    """Settings of an engine process: of its first role, and with `either_role` of both."""

    first_role: ClassVar[RoleName]

    @classmethod
    def load(cls, argv: Sequence[str], *, prog: str | None = None) -> Self:
        """Read the settings, see `ServiceConfig.load`; those of the other role alone only with `either_role`."""
        config = super().load(argv, prog=prog)
        if not config.either_role:
            CONFIGS[cls.first_role].load(argv, prog=prog)
        return config

    @property
    def roles(self) -> list[RoleName]:
        """The roles that the process may have, the first one first."""
        first = self.first_role
        return [first, *(role for role in ROLES if role != first)] if self.either_role else [first]

    @property
    def prefill_step_tokens(self) -> int:
        """See `PrefillConfig`."""
        return self.max_num_batched_tokens if "prefill" in self.roles else 0

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        if self.roles == ["decode"]:
            return super(PrefillConfig, self).most_step_tokens  # as DecodeConfig says
        prefill = self.max_num_batched_tokens
        return max(prefill, self.least_step_tokens) if prefill else 0

    @property
    def least_step_tokens(self) -> int:
        """See `EngineConfig`."""
        return super(PrefillConfig, self).least_step_tokens if "decode" in self.roles else 0

    @property
    def takes_prompts(self) -> bool:
        """See `EngineConfig`."""
        return "prefill" in self.roles or self.computes_prompts

    @property
    def most_decoded(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_seqs if "decode" in self.roles else 0

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        if self.either_role and self.computes_prompts:
            raise ConfigError("computes_prompts", "not with either_role: the instance has both roles at once")
        return self


class PrefillProcessConfig(EngineProcessConfig):
    """Computes prompts and streams their KV to decode instances."""

    first_role: ClassVar[RoleName] = "prefill"
    service_name: ClassVar[str | None] = "prefill"


class DecodeProcessConfig(EngineProcessConfig):
    """Receives prompts' KV and generates tokens in a continuous batch."""

    first_role: ClassVar[RoleName] = "decode"
    service_name: ClassVar[str | None] = "decode"


async def serve(context: ProcessContext, config: EngineProcessConfig, start: StartEngine = start_engine) -> None:
    """Run an engine instance until told to stop; raise as `run_instance`, and as `draft_model_of`."""
    async with AsyncExitStack() as stack:
        roles: list[EngineRole] = []
        for name in config.roles:
            if name == "prefill":
                roles.append(prefill_role(config))
            else:
                draft_model = await stack.enter_async_context(draft_model_of(context, config, start))
                roles.append(decode_role(config, draft_model))
        if config.nnodes > 1:
            listener = StagesListener(config.stages_listen, config.nnodes - 1, Security.of(config))
            start = partial(start, remote=await stack.enter_async_context(listener))
        await run_instance(context, config, roles, stages=config.pipeline_parallel_size, start=start)
