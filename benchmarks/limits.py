"""What this machine can do at all, for comparison: raw TCP between two processes, and copies in memory.

`python -m benchmarks.limits` is the process at the far end of raw TCP: it prints its address and reads connections to
their ends, each into one buffer of the size that its first eight bytes say, and answers with one byte.
"""

import socket
import sys
import time

CONFIRMED = b"\1"
_COPY_BYTES = 64 << 20  # well beyond the caches


def tcp_seconds(address: str, message: memoryview, nbytes: int) -> float:
    """Seconds that `nbytes` take through one connection in blocking writes of `message`, until the reader has all."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(message.nbytes.to_bytes(8, "little"))
        begin = time.perf_counter()
        for _ in range(nbytes // message.nbytes):
            connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != CONFIRMED:
            raise ConnectionError("the far end of raw TCP has gone")
        return time.perf_counter() - begin


def copy_bytes_per_s(message_bytes: int, nbytes: int) -> float:
    """Bytes per second copied from memory to memory, in pieces of `message_bytes`, one thread."""
    source, target = memoryview(bytearray(_COPY_BYTES)), memoryview(bytearray(_COPY_BYTES))
    target[:] = source
    begin, done = time.perf_counter(), 0
    while done < nbytes:
        for offset in range(0, _COPY_BYTES, message_bytes):
            target[offset : offset + message_bytes] = source[offset : offset + message_bytes]
        done += _COPY_BYTES
    return done / (time.perf_counter() - begin)


def main() -> None:
    """Reads connections until it is killed or its standard input ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready: 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
                buffer = memoryview(bytearray(size))
                while connection.recv_into(buffer):
                    pass
                connection.sendall(CONFIRMED)


if __name__ == "__main__":
    sys.exit(main())
