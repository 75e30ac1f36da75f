"""gRPC alone as one of the stores: the messages that a store over gRPC cannot do without, and nothing else.

No peer but a floor: nothing is kept, checked or looked up. An operation is a message for each MiB one way and a small
one the other way, on one stream, with our channel options. `python -m benchmarks.peers.bare_grpc` is the far end.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator

import uvloop

from benchmarks.kvstore_shape import Memory
from benchmarks.peers.contract import Batches
from benchmarks.processes import child
from moonpool.kv.frames import FRAME_BYTES
from moonpool.rpc.tuning import LARGE_MESSAGE_OPTIONS, tune_gc, tune_grpc, tune_malloc

NAME = "bare gRPC"
_METHOD = "/benchmarks.Bare/Move"
_NUMBER = 8
MEMORY_BYTES = 64 << 20
"""As large as that of a client, so that it finds what it looks for."""
_PUT, _GET = 0, 1


@contextlib.contextmanager
def running(nbytes: int) -> Iterator[str]:
    """The far end; it keeps nothing, whatever `nbytes` is."""
    with child("benchmarks.peers.bare_grpc") as far:
        yield far.address


def _request(verb: int, nbytes: int) -> bytes:
    return verb.to_bytes(1, "little") + nbytes.to_bytes(_NUMBER, "little")


class _Client:
    """An event loop that runs only while a call is being measured, as our own store's."""

    def __init__(self, address: str, memory: Memory) -> None:
        import grpc.aio  # once gRPC's ways are chosen

        self._memory = memory
        self._end = grpc.aio.EOF
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._open = lambda: grpc.aio.insecure_channel(address, options=LARGE_MESSAGE_OPTIONS)
        self._runner.run(self._connect())

    async def _connect(self) -> None:
        self._channel = self._open()
        self._call = self._channel.stream_stream(_METHOD)()

    def put(self, batches: Batches, block_bytes: int) -> None:
        async def run() -> None:
            for keys in batches:
                nbytes = len(keys) * block_bytes
                for at in range(0, nbytes, FRAME_BYTES):
                    piece = self._memory.source[at : min(at + FRAME_BYTES, nbytes)]
                    await self._call.write(b"".join((_request(_PUT, nbytes), piece)))
                if await self._call.read() is self._end:
                    raise RuntimeError("the far end has gone")

        self._runner.run(run())

    def get(self, batches: Batches, block_bytes: int) -> None:
        async def run() -> None:
            for keys in batches:
                nbytes = len(keys) * block_bytes
                await self._call.write(_request(_GET, nbytes))
                for at in range(0, nbytes, FRAME_BYTES):
                    data = await self._call.read()
                    if data is self._end:
                        raise RuntimeError("the far end has gone")
                    self._memory.target[at : at + len(data)] = data

        self._runner.run(run())

    def clear(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self._runner.run(self._channel.close())
        self._runner.close()


def client(address: str, memory: Memory) -> _Client:
    """A client."""
    tune_grpc()
    return _Client(address, memory)


async def _serve() -> None:
    import grpc.aio  # once gRPC's ways are chosen

    source = Memory(MEMORY_BYTES).source

    async def move(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        got = 0
        async for data in requests:
            nbytes = int.from_bytes(data[1 : 1 + _NUMBER], "little")
            if data[0] == _GET:
                for at in range(0, nbytes, FRAME_BYTES):
                    place = at % source.nbytes
                    await context.write(bytes(source[place : place + min(FRAME_BYTES, nbytes - at)]))
                continue
            got += len(data) - 1 - _NUMBER
            if got >= nbytes:
                got = 0
                await context.write(b"\1")

    server = grpc.aio.server(options=LARGE_MESSAGE_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(move)
    service, _, method = _METHOD.lstrip("/").partition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready: 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    tune_malloc()
    tune_gc()
    tune_grpc()
    sys.exit(uvloop.run(_serve()))
