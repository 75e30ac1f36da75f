"""Raw TCP between two processes, copies in memory, and reads and appends of a disk, for comparison.

`python -m benchmarks.limits` is the receiving process: it prints its address and reads each connection to its end. A
connection begins with the size of a read and the size of the memory that is read into, eight bytes each, and is
answered with one byte at its end.
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_FILL_BYTES = 8 << 20

Piece = tuple[int, int]
"""Offset and length."""


def drop_cache(folder: Path) -> int:
    """Drop all files under `folder` from the page cache; return their bytes.

    The kernel does not drop pages that are not written yet, so everything is synced before.
    """
    os.sync()
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                total += os.fstat(fd).st_size
            finally:
                os.close(fd)
    return total


def append_seconds(path: Path, source: memoryview, piece_bytes: int, nbytes: int, sync_bytes: int) -> float:
    """Seconds until `nbytes` have been appended to a new file and are on the device.

    Args:
        path: the file, removed afterwards.
        source: the data, used in a circle; a multiple of `piece_bytes`.
        piece_bytes: bytes per write.
        nbytes: in all.
        sync_bytes: `fdatasync` each time this many were written.
    """
    begin = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = synced = 0
        while done < nbytes:
            at = done % source.nbytes
            done += os.write(fd, source[at : at + min(piece_bytes, nbytes - done)])
            if done - synced >= sync_bytes:
                os.fdatasync(fd)
                synced = done
        os.fdatasync(fd)
        return time.perf_counter() - begin
    finally:
        os.close(fd)
        path.unlink()


def make_file(path: Path, nbytes: int) -> None:
    """Write a file with `nbytes` without holes and sync the file."""
    data = os.urandom(1 << 16) * (_FILL_BYTES >> 16)
    with path.open("wb") as file:
        while (left := nbytes - file.tell()) > 0:
            file.write(data[:left])
        file.flush()
        os.fsync(file.fileno())


def layer_major(blocks: int, layers: int, slice_bytes: int, pitch: int, chain: int) -> list[Piece]:
    """Pieces in a block file, `pitch` apart, in the order in which chains are read layer by layer."""
    pieces = []
    for first in range(0, blocks, chain):
        group = range(first, min(first + chain, blocks))
        pieces += [(block * pitch + layer * slice_bytes, slice_bytes) for layer in range(layers) for block in group]
    return pieces


def whole_blocks(blocks: int, block_bytes: int, pitch: int) -> list[Piece]:
    """The same blocks, each in one piece."""
    return [(block * pitch, block_bytes) for block in range(blocks)]


def read_seconds(path: Path, pieces: Sequence[Piece], depth: int, *, direct: bool = False) -> float:
    """Seconds until `depth` threads have read all pieces, in order, each into memory that was touched before.

    With `direct` past the page cache: offsets and lengths are multiples of a sector's.

    Raises:
        OSError: a piece is not in the file.
    """
    todo = iter(pieces)
    lock = threading.Lock()
    failed: list[BaseException] = []
    longest = max(length for _, length in pieces)
    memories = [memoryview(mmap.mmap(-1, longest)) for _ in range(depth)]
    for memory in memories:
        memory[:] = b"\1" * longest
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def reader(memory: memoryview) -> None:
        try:
            while True:
                with lock:
                    piece = next(todo, None)
                if piece is None:
                    return
                _read(fd, piece, memory)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=reader, args=(memory,)) for memory in memories]
    try:
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
    finally:
        os.close(fd)
    if failed:
        raise failed[0]
    return seconds


def _read(fd: int, piece: Piece, memory: memoryview) -> None:
    offset, length = piece
    done = 0
    while done < length:
        count = os.preadv(fd, [memory[done:length]], offset + done)
        if not count:
            raise OSError(f"the file ends before {offset + length}")
        done += count


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
    """Read connections until it is killed."""
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
