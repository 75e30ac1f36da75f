"""The leader's side: stages on other hosts join here before the engine starts."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, Self

from moonpool.base import world
from moonpool.base.config import format_address, is_loopback, parse_address
from moonpool.base.errors import ConfigError, Mismatch, MoonpoolError
from moonpool.base.rpc.accept import accept, close_if_cancelled
from moonpool.base.rpc.tls import NAME, Security
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.channel import ChannelClosed
from moonpool.engine.messages import EngineSpec
from moonpool.engine.remote.link import SILENCE_S, StageLink
from moonpool.engine.remote.messages import (
    ANSWER,
    HELLO,
    SCHEMA,
    TO_LEADER,
    TO_STAGE,
    StageHello,
    StageRefusal,
    StageWelcome,
)
from moonpool.engine.remote.peer_check import check_peer
from moonpool.engine.remote.remote_worker import RemoteWorker
from moonpool.engine.remote.schema import SchemaError
from moonpool.engine.start_listener import StartListener
from moonpool.engine.worker_process import Worker

log = get_logger(__name__)
JOIN_S = 5.0
"""In which a peer must introduce itself."""
MAX_HELLO_BYTES = 4096
MAX_JOINING = 16
"""Peers that introduce themselves at the same time, at most; others are turned away."""
_PAUSE_S = 0.1


class StagesListener:
    """Where the stages of other hosts join; a context manager.

    Attributes:
        address: "host:port". Whoever comes before `joined` is called is turned away, and comes again.

    Args:
        address: "host:port" to listen at; port 0 = any.
        count: stages on other hosts: the last ones of the pipeline, by their node rank.
        security: certificates; None = plaintext.
        silence_s: a stage that is silent for so long is lost, seconds.
    """

    def __init__(
        self, address: str, count: int, security: Security | None = None, *, silence_s: float = SILENCE_S
    ) -> None:
        self.address = address
        self._count, self._security, self._silence_s = count, security, silence_s
        self._first, self._weights = 0, b""
        self._joined: dict[int, RemoteWorker] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = contextlib.ExitStack()

    @property
    def count(self) -> int:
        return self._count

    async def __aenter__(self) -> Self:
        """Take the address.

        Raises:
            ConfigError: naming `stages_listen`: cannot listen there.
        """
        host, port = parse_address(self.address)
        self._socket = self._stack.enter_context(world.tcp_socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._stack.close()
            raise ConfigError("stages_listen", f"cannot listen at {self.address}: {error.strerror}") from error
        self.address = format_address(host, self._socket.getsockname()[1])
        if self._security is None and not is_loopback(host):
            log.warning("stages of other hosts are in plaintext to all on the way; see tls_cert", listen=host)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stack.close()
        for worker in self._joined.values():
            worker.close()
            await worker.wait_closed()

    async def joined(self, spec: EngineSpec, listener: StartListener) -> Sequence[Worker]:
        """Wait, without a limit, until all stages have joined; return them in their order.

        Raises:
            ConfigError: the pipeline has too few stages.
        """
        if spec.stages <= self._count:
            raise ConfigError("nnodes", f"{self._count + 1} hosts need as many stages at least, not {spec.stages}")
        self._first = spec.stages - self._count
        self._weights = spec.weights
        self._socket.listen()
        self._spawn(self._accept(self._socket))
        told: list[int] = []
        while missing := [rank for rank in range(1, self._count + 1) if not self._is_there(rank)]:
            if missing != told:
                told = missing
                listener.starting(f"waiting for stages of other hosts at {self.address}: node ranks {missing}")
            self._changed.clear()
            await self._changed.wait()
        return [self._joined[rank] for rank in range(1, self._count + 1)]

    def _is_there(self, rank: int) -> bool:
        return rank in self._joined and not self._joined[rank].ended()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = await accept(listener)
            except OSError as error:
                log.warning("a stage could not be accepted", error=str(error))
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._tasks) > MAX_JOINING:
                sock.close()
            else:
                close_if_cancelled(self._spawn(self._join(sock, format_address(*address[:2]))), sock)

    async def _join(self, sock: socket.socket, peer: str) -> None:
        """Let a stage in, or refuse the peer by name."""
        link: StageLink | None = None
        try:
            async with asyncio.timeout(JOIN_S):
                tls = None if self._security is None else self._security.tls.socket_context(server=True)
                link = await StageLink.open(sock, tls, server=True, name=NAME, limit_s=JOIN_S)
                check_peer(link, None if self._security is None else self._security.gate)
                hello: StageHello = await link.ask(HELLO, MAX_HELLO_BYTES)
            self._admit(link, hello)
        except (MoonpoolError, SchemaError, OSError, TimeoutError, ChannelClosed) as error:
            why = (link.reason if link is not None else "") or str(error) or "it said nothing in time"
            log.warning("refused what is no stage of this engine", peer=peer, reason=why)
            if link is None:
                sock.close()
            else:
                link.tell(ANSWER, StageRefusal(why))
                await link.finish(why)
        except asyncio.CancelledError:
            if link is None:
                sock.close()
            else:
                link.close("the leader has ended")
            raise

    def _admit(self, link: StageLink, hello: StageHello) -> None:
        rank = hello.node_rank
        if hello.schema != SCHEMA:
            raise Mismatch("version", f"the stage runs Moonpool {hello.version}, the leader another build")
        if not 1 <= rank <= self._count:
            raise Mismatch("node_rank", f"must be from 1 to {self._count}, not {rank}")
        if hello.weights != self._weights:
            ours, theirs = self._weights.hex()[:8], hello.weights.hex()[:8]
            raise Mismatch("model", f"the stage has other weights ({theirs}) than the leader ({ours})")
        if self._is_there(rank):
            raise Mismatch("node_rank", f"{rank} has joined already, from {self._joined[rank].link.peer}")
        if (lost := self._joined.get(rank)) is not None:
            lost.close()
        link.tell(ANSWER, StageWelcome(self._first + rank - 1))
        link.begin(TO_LEADER, TO_STAGE, pings=True, silence_s=self._silence_s)
        self._joined[rank] = RemoteWorker(self._first + rank - 1, link, self._changed.set)
        log.info("a stage has joined", node_rank=rank, peer=link.peer)
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
