"""Raw TCP between two processes and copies in memory on this machine, for comparison.

`python -m benchmarks.limits` is the receiving process: it prints its address and reads each connection to its end. A
connection begins with the size of a read and the size of the memory that is read into, eight bytes each, and is
answered with one byte at its end.
"""

import socket
import time

CONFIRMED = b"\1"
MEMORY_BYTES = 256 << 20
"""Memory at the far end."""
_COPY_BYTES = 64 << 20  # well beyond the caches


def tcp_seconds(address: str, source: memoryview, message_bytes: int, nbytes: int, target_bytes: int) -> float:
    """Seconds until the reader has received `nbytes` over raw TCP.

    Args:
        address: of the far end.
        source: the data, used in a circle.
        message_bytes: of each blocking write, and of each read at most.
        nbytes: sent in all, a multiple of `message_bytes`.
        target_bytes: size of the memory that the far end reads into, used in a circle.
    """
    host, _, port = address.rpartition(":")
    messages = [source[at : at + message_bytes] for at in range(0, source.nbytes, message_bytes)]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(message_bytes.to_bytes(8, "little") + target_bytes.to_bytes(8, "little"))
        begin = time.perf_counter()
        for index in range(nbytes // message_bytes):
            connection.sendall(messages[index % len(messages)])
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != CONFIRMED:
            raise ConnectionError("the far end of raw TCP has closed the connection")
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


def _read_all(connection: socket.socket, memory: bytearray) -> None:
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
    target = memoryview(memory)[: int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")]
    at = 0
    while count := connection.recv_into(target[at : at + size]):
        at += count
        if at + size > target.nbytes:
            at = 0
    connection.sendall(CONFIRMED)


def main() -> None:
    """Reads connections until it is killed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready: 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        memory = bytearray(MEMORY_BYTES)
        memory[:] = b"\1" * MEMORY_BYTES
        while True:
            connection, _ = listener.accept()
            with connection:
                _read_all(connection, memory)


if __name__ == "__main__":
    main()
