"""The connection of a stage on another host: processor time of both ends for KV, in plaintext and within TLS.

`python -m benchmarks.stage_links [--json]`. Over loopback, in one process, as leader and stage do it: the sender copies
a slice and checks the hash, the receiver decodes the message, checks the hash and copies the slice into the pool.
"""

import argparse
import asyncio
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.frame import Progress, Row, paired, run
from moonpool.base.kv.keys import slice_hash
from moonpool.base.rpc.tls import NAME, Tls
from moonpool.cli.certs import Authority
from moonpool.engine.remote.link import StageLink
from moonpool.engine.remote.messages import TO_LEADER, TO_STAGE, KVSlice

SIZES = (32 << 10, 256 << 10)
"""Bytes of a slice: of a block of 16 tokens with 8 heads of 128 in bfloat16, and of one of 64 tokens with 16 heads."""
NBYTES = 128 << 20
TURN = 16
LIMIT_S = 30.0
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


async def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        near = socket.socket()
        near.setblocking(False)
        await loop.sock_connect(near, listener.getsockname())
        far, _ = await loop.sock_accept(listener)
        return near, far


async def link_seconds(size: int, tls: Contexts | None) -> float:
    """Processor seconds a GB of both ends."""
    near, far = await connected()
    client, server = tls or (None, None)
    sender, receiver = await asyncio.gather(
        StageLink.open(near, client, server=False, name=NAME, limit_s=LIMIT_S),
        StageLink.open(far, server, server=True, name=NAME, limit_s=LIMIT_S),
    )
    sender.begin(TO_LEADER, TO_STAGE, pings=True, silence_s=LIMIT_S)
    receiver.begin(TO_STAGE, TO_LEADER, pings=False, silence_s=LIMIT_S)
    source, target, count = bytes(size), bytearray(size), NBYTES // size
    value = slice_hash(source)

    async def send() -> None:
        for number in range(count):
            copy = bytes(memoryview(source))
            assert slice_hash(copy) == value
            sender.send(KVSlice(0, number, value, True, copy))
            if number % TURN == 0:
                await sender.room()

    async def receive() -> None:
        for _ in range(count):
            found: KVSlice = await receiver.receive()
            assert slice_hash(found.data) == found.value
            target[:] = found.data

    begin = time.process_time()
    await asyncio.gather(send(), receive())
    seconds = time.process_time() - begin
    for link in (sender, receiver):
        link.close("over")
        await link.wait_closed()
    return seconds / (count * size / 1e9)


async def tcp_seconds(size: int) -> float:
    """Processor seconds a GB of both ends of a plain connection that does nothing else."""
    near, far = await connected()
    loop, source, target, count = asyncio.get_running_loop(), bytes(size), bytearray(size), NBYTES // size

    async def receive() -> None:
        left = count * size
        while left:
            left -= await loop.sock_recv_into(far, target)

    async def send() -> None:
        for _ in range(count):
            await loop.sock_sendall(near, source)

    begin = time.process_time()
    with near, far:
        await asyncio.gather(send(), receive())
    return (time.process_time() - begin) / (count * size / 1e9)


async def _measure(options: argparse.Namespace, progress: Progress, tls: Contexts) -> list[Row]:
    rows = []
    for size in SIZES:
        for name, contexts in (("in plaintext", None), ("within TLS", tls)):
            pairs = [(await link_seconds(size, contexts), await tcp_seconds(size)) for _ in range(options.runs)]
            what = f"KV in slices of {size >> 10} KiB, {name}"
            rows.append(paired(what, "s/GB", pairs, "raw TCP", less_is_better=True))
            progress(f"{what}: {rows[-1].value:.2f} s/GB")
    return rows


def measure(options: argparse.Namespace, progress: Progress) -> Sequence[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificate = Authority.at(folder).issue(folder, "prefill", "prefill", [], 2)
        tls = Tls(folder / "ca.pem", certificate, folder / "prefill.key")
        contexts = tls.socket_context(server=False), tls.socket_context(server=True)
        return uvloop.run(_measure(options, progress, contexts))


if __name__ == "__main__":
    run("stage_links", measure)
