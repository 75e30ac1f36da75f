"""Turns messages into requests, and serves those that the conductor makes itself."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from moonpool.errors import Unavailable
from moonpool.v1 import conductor_pb2
from services.conductor.answer import Answer
from services.conductor.checkpoint import Checkpoint
from services.conductor.config import ConductorConfig
from services.conductor.desk import Desk
from services.conductor.registry import Registry
from services.conductor.request import Request, Served, read_request


class Intake:
    """Reads requests on worker threads.

    Args:
        checkpoint: the conductor's own.
        registry: what the engines serve.
        desk: serves requests.
        tokenizing: worker threads.
        config: the conductor's.
        clock: of the times of requests, seconds.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        registry: Registry,
        desk: Desk,
        tokenizing: ThreadPoolExecutor,
        config: ConductorConfig,
        clock: Callable[[], float],
    ) -> None:
        self._checkpoint = checkpoint
        self._registry = registry
        self._desk = desk
        self._tokenizing = tokenizing
        self._config = config
        self._clock = clock

    def served(self) -> Served:
        """What requests are checked against.

        Raises:
            Unavailable: no engine has joined.
        """
        model, layout, checkpoint = self._registry.model, self._registry.layout, self._checkpoint
        if model is None or layout is None:
            raise Unavailable("no prefill and no decode instance has joined")
        return Served(
            checkpoint.name,
            checkpoint.config,
            checkpoint.tokenizer,
            model.namespace,
            layout,
            model.max_tokens,
            self._config.queue_deadline_s,
            checkpoint.config.default_sampling.given if self._config.generation_config == "auto" else {},
            self._config.tenant_weights,
        )

    def model(self) -> str:
        """Name of what is served; raises as `served`."""
        return self.served().name

    async def read(self, message: conductor_pb2.GenerateRequest, request_id: str = "") -> Request:
        """Checks and tokenises a message; see `read_request`."""
        served, name = self.served(), request_id or secrets.token_hex(8)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._tokenizing, read_request, message, served, name, lambda: secrets.randbits(64)
        )

    async def compute(self, message: conductor_pb2.GenerateRequest) -> None:
        """Serves a request of the conductor's own, and drops the answer.

        Raises:
            MoonpoolError: it failed, or was refused.
        """
        request, arrived = await self.read(message), self._clock()
        serving = self._desk.open(
            Answer.begin(request, self.served(), arrived), arrived + self._config.request_timeout_s
        )
        try:
            while await serving.outgoing.next() is not None:
                pass
        finally:
            self._desk.client_left(serving, serving.outgoing)
