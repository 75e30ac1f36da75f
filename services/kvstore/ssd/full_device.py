"""Whether a device has room: what a full one says, to us or to LMDB, and how to find out.

Must not know what is written. LMDB says clearly that a device is full only when not a byte fits; where part of a page
fits it speaks of an input/output error, and of a quota in words that its binding has no class for.
"""

import contextlib
import errno
import pathlib
from collections.abc import Iterator

import lmdb

PROBE_BYTES = 1 << 20


def is_full(error: BaseException) -> bool:
    """Whether that is what a full device says."""
    if isinstance(error, lmdb.DiskError):
        return True
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def probe(folder: pathlib.Path, nbytes: int) -> None:
    """Blocking. Writes a file of so many bytes and deletes it.

    Raises:
        OSError: the folder cannot be written, or has no room for that.
    """
    path = folder / "probe"
    try:
        path.write_bytes(bytes(nbytes))
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def told_by_lmdb(folder: pathlib.Path) -> Iterator[None]:
    """Blocking. Around LMDB's writing into `folder`: an error without a class of its own is looked into.

    Raises:
        lmdb.DiskError: in the place of such an error, when the device has no room.
    """
    try:
        yield
    except lmdb.Error as error:
        if type(error) is lmdb.Error:
            try:
                probe(folder, PROBE_BYTES)
            except OSError as failure:
                if is_full(failure):
                    raise lmdb.DiskError(f"{error}; {failure}") from error
        raise
