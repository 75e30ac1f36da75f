"""The data folder of one disk."""

import fcntl
import os
from pathlib import Path
from typing import Literal

from moonpool.base.errors import ConfigError
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.ssd.files import ALIGN, PRIVATE, FileLayer, is_full

log = get_logger(__name__)
Durability = Literal["power", "process"]  # the loss that a committed block survives: power, or this process


class DataFolder:
    """A locked data folder, made if need be, of the disk with that number. `durability`: what commits survive.

    Raises:
        ConfigError: the folder cannot be made or written, or another process has the folder; names `data_dir`.
    """

    def __init__(self, path: Path, files: FileLayer, durability: Durability = "power", disk: int = 0) -> None:
        self.path = path
        self.files = files
        self.disk = disk
        self.segments = path / "segments"
        self.index = path / "index"
        self._note = path / "unsynced"
        self._lock_fd = -1
        try:
            files.make_folder(self.segments)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._probe()
            self.durability = self._settle(durability)
        except OSError as error:
            self.close()
            used = isinstance(error, BlockingIOError)
            reason = "is used by another process" if used else f"cannot be used: {error.strerror or error}"
            raise ConfigError("data_dir", f"{path} {reason}") from error

    def _probe(self) -> None:
        """Find a read-only folder now rather than at the first write. A full one is good for reading."""
        try:
            self.files.probe(self.segments, ALIGN)
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("the device is full", path=str(self.path))

    def _settle(self, durability: Durability) -> Durability:
        """Deal with blocks that an earlier process left unsynced, and note the boot in which this one does so.

        After a machine restart, the index from a process that did not sync is worthless: the index is deleted.
        """
        noted = self._note.read_bytes() if self._note.exists() else None
        boot, now = None if noted is None else noted.decode(errors="replace").strip(), self.files.boot_id()
        is_same_boot = bool(boot) and boot == now  # "" is a boot that is not known
        if boot is not None and not is_same_boot:
            log.warning("the machine restarted before everything was synced; rebuilding the index")
            self.files.remove_folder(self.index)
        elif is_same_boot and durability == "power":
            self.files.sync_all()
        if durability == "process":
            try:
                if not is_same_boot:  # noted already; written anew, the note could be lost, as the device may be full
                    self.files.write_note(self._note, now)
                return "process"
            except OSError as error:
                if not is_full(error):
                    raise
                log.warning("the device is too full to do without syncs; durability is power", error=str(error))
        self.all_synced()  # half a note would say that something is not synced
        return "power"

    def relock(self) -> bool:
        """Lock the folder that is at the path now; return whether the file system has changed.

        Raises:
            OSError: no store's folder is there, or another process has the folder.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        if os.path.samestat(os.fstat(fd), os.fstat(self._lock_fd)):
            os.close(fd)
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._lock_fd)
        self._lock_fd = fd
        return True

    def all_synced(self) -> None:
        self.files.unlink(self._note)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
