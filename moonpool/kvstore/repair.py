"""Check and repair of a data folder that no kvstore uses: `moonpool kvstore verify`. All functions block."""

import contextlib
import fcntl
from collections.abc import Callable
from pathlib import Path

import lmdb

from moonpool.base.errors import ConfigError
from moonpool.kvstore.record_store import RecordFolder, read_records
from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.data_folder import DataFolder
from moonpool.kvstore.ssd.files import ALIGN, FileLayer
from moonpool.kvstore.ssd.folder_check import VerifyReport, check_blocks
from moonpool.kvstore.ssd.recovery import Recovery
from moonpool.kvstore.ssd.segment_files import segment_path


def verify(path: Path, on_segment: Callable[[int, int], None] = lambda done, of: None) -> VerifyReport:
    """Check a data folder without changes; `on_segment` is called with the number of checked segments and the total.

    Raises:
        ConfigError: `path` holds no store, cannot be read, or is used by a kvstore.
    """
    try:
        lock = (path / "lock").open("rb")
    except OSError as error:
        raise ConfigError("data_dir", f"{path} holds no store: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            report = check_blocks(path, on_segment)
            report.records_error = read_records(path / "records")[1]
            return report
        except BlockingIOError as error:
            raise ConfigError("data_dir", f"{path} is used by another process") from error
        except (OSError, lmdb.Error) as error:
            raise ConfigError("data_dir", f"{path} cannot be read: {error}") from error


def repair(path: Path, report: VerifyReport) -> None:
    """Drop the damaged records that a check found, and write the index and the conductors' records anew.

    Raises:
        ConfigError: the folder cannot be written, or is used by a kvstore.
    """
    files = FileLayer()
    folder = DataFolder(path, files)
    with contextlib.ExitStack() as stack:
        stack.callback(folder.close)
        stack.callback(files.close_all)
        try:
            for number, offset in report.damaged:
                files.write(segment_path(folder.segments, number), [bytes(ALIGN)], offset)
            for number in {number for number, _ in report.damaged}:
                files.sync(segment_path(folder.segments, number))
            files.remove_folder(folder.index)
            Recovery(folder, Catalogue()).index.close()
            with contextlib.closing(RecordFolder(path / "records")) as records:
                records.load()
        except (OSError, lmdb.Error) as error:
            raise ConfigError("data_dir", f"{path} cannot be repaired: {error}") from error
