"""gRPC without a store: the same bytes in messages, nothing kept, checked or looked up.

It is not a peer: the difference to it is a store's own time. An operation is a message for each MiB one way, a small
one the other way, on one stream with Moonpool's channel options. `python -m benchmarks.peers.bare_grpc` is the far end.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator

import uvloop

from benchmarks.kvstore_client import Memory
from benchmarks.peers.contract import Batches
from benchmarks.processes import child
from moonpool.base.kv.frames import FRAME_BYTES
from moonpool.base.rpc.tuning import LARGE_MESSAGE_OPTIONS, tune_gc, tune_grpc, tune_malloc

NAME = "bare gRPC"
_METHOD = "/benchmarks.Bare/Move"
_NUMBER = 8
MEMORY_BYTES = 64 << 20
"""As large as a client's, so that the client finds the bytes it checks."""
_PUT, _GET = 0, 1


@contextlib.contextmanager
def running(nbytes: int) -> Iterator[str]:
    """The far end; it keeps nothing, whatever `nbytes` is."""
    with child("benchmarks.peers.bare_grpc") as far:
        yield far.address


def _request(verb: int, nbytes: int) -> bytes:
    return verb.to_bytes(1, "little") + nbytes.to_bytes(_NUMBER, "little")


class _Client:
    """Its event loop runs only while a call is being measured, as that of Moonpool's client."""

    def __init__(self, address: str, memory: Memory) -> None:
        self._memory = memory
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runner.run(self._connect(address))

    async def _connect(self, address: str) -> None:
        import grpc.aio  # after `tune_grpc`

        self._channel = grpc.aio.insecure_channel(address, options=LARGE_MESSAGE_OPTIONS)
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(_METHOD)()

    def put(self, batches: Batches, block_bytes: int) -> None:
        async def run() -> None:
            for keys in batches:
                nbytes = len(keys) * block_bytes
                for at in range(0, nbytes, FRAME_BYTES):
                    piece = self._memory.source[at : min(at + FRAME_BYTES, nbytes)]
                    await self._call.write(b"".join((_request(_PUT, nbytes), piece)))
                if not isinstance(await self._call.read(), bytes):
                    raise RuntimeError("the far end has closed the stream")

        self._runner.run(run())

    def get(self, batches: Batches, block_bytes: int) -> None:
        async def run() -> None:
            for keys in batches:
                nbytes = len(keys) * block_bytes
                await self._call.write(_request(_GET, nbytes))
                for at in range(0, nbytes, FRAME_BYTES):
                    data = await self._call.read()
                    if not isinstance(data, bytes):
                        raise RuntimeError("the far end has closed the stream")
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
    import grpc.aio  # after `tune_grpc`

    source = Memory(MEMORY_BYTES).source

    async def move(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
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
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(move)
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
