"""One connection between a leader and a stage of another host, both ends in this process."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.rpc.tls import NAME
from moonpool.engine.remote import link
from moonpool.engine.remote.link import StageLink
from moonpool.engine.remote.messages import ANSWER, StageRefusal
from tests.unit.engine.remote.hosts import security

WAIT_S = 60.0
SMALL_BYTES = 4 << 10
"""Buffers of the system, in which little of a message has room."""
LONG = StageRefusal("x" * (60 << 10))


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that holds little on its way."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.socket()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.setblocking(False)
    return ours, theirs


@asynccontextmanager
async def links(folder: Path, secure: bool) -> AsyncIterator[tuple[StageLink, StageLink]]:
    """A leader's end and a stage's."""
    contexts: list[ssl.SSLContext | None] = [None, None]
    if secure:
        contexts = [security(folder).tls.socket_context(server=server) for server in (True, False)]
    ours, theirs = connected()
    options: dict[str, Any] = {"name": NAME, "limit_s": WAIT_S}
    leader, stage = await asyncio.gather(
        StageLink.open(ours, contexts[0], server=True, **options),
        StageLink.open(theirs, contexts[1], server=False, **options),
    )
    yield leader, stage
    for end in (leader, stage):
        end.close("the test is over")
        await end.wait_closed()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_what_was_sent_before_the_end_arrives(tmp_path: Path, secure: bool) -> None:
    async with links(tmp_path, secure) as (leader, stage), asyncio.timeout(WAIT_S):
        leader.tell(ANSWER, LONG)
        finishing = asyncio.create_task(leader.finish("refused"))
        assert await stage.ask(ANSWER, 1 << 20) == LONG
        await finishing
        assert leader.reason == "refused"


async def test_an_end_that_takes_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TLS; in plaintext the watch of a link ends this."""
    monkeypatch.setattr(link, "SILENCE_S", 0.2)
    async with links(tmp_path, secure=True) as (leader, _), asyncio.timeout(WAIT_S):
        for _ in range(100):
            leader.tell(ANSWER, LONG)
        await leader.finish("refused")
        assert leader.reason == "refused"
