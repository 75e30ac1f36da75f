"""The data folder of one process: its lock, and the note that blocks may not have reached the device.

DATA_DIR/lock          held by the one process that uses the folder
DATA_DIR/unsynced      holds the boot's id while blocks may not have reached the device (durability "process")
DATA_DIR/index/        LMDB
DATA_DIR/segments/     0000000000000001.seg, ...
"""

import fcntl
import os
from pathlib import Path
from typing import Literal

from moonpool.errors import ConfigError
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.device import is_full
from services.kvstore.ssd.files import Files
from services.kvstore.ssd.records import ALIGN

log = get_logger(__name__)

Durability = Literal["power", "process"]
"""What a block that was committed survives: a loss of power, or the death of this process only."""


class DataFolder:
    """A locked data folder, made if need be.

    Raises:
        ConfigError: naming `data_dir`: it cannot be made or written, or another process has it.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self.files = files
        self.segments = path / "segments"
        self.index = path / "index"
        self._note = path / "unsynced"
        self._lock_fd = -1
        try:
            files.make_folder(self.segments)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._probe()
        except OSError as error:
            self.close()
            used = isinstance(error, BlockingIOError)
            reason = "is used by another process" if used else f"cannot be used: {error.strerror or error}"
            raise ConfigError("data_dir", f"{path} {reason}") from error

    def _probe(self) -> None:
        """Finds a read-only folder now rather than at the first write. A full one is good for reading."""
        try:
            self.files.probe(self.segments, ALIGN)
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("the device is full", path=str(self.path))

    def settle(self, durability: Durability) -> tuple[Durability, bool]:
        """Deals with blocks that an earlier process left unsynced, and notes whether this one will.

        After a restart of the machine the index of a process that did not sync is worth nothing: it is deleted.
        Returns what commits will survive, and whether an earlier process' blocks may still be unsynced.
        """
        boot, now = self._noted_boot(), self.files.boot_id()
        is_same_boot = bool(boot) and boot == now
        if boot is not None and not is_same_boot:
            log.warning("the machine restarted before everything was synced; rebuilding the index")
            self.files.remove_folder(self.index)
        elif is_same_boot and durability == "power":
            self.files.sync_all()
        if durability == "process":
            if is_same_boot:  # noted already; written anew it could be lost, as the device may be full
                return "process", True
            try:
                self.files.write_note(self._note, now)
                return "process", False
            except OSError as error:
                if not is_full(error):
                    raise
                log.warning("the device is too full to do without syncs; durability is power", error=str(error))
        if boot is not None or durability == "process":  # half a note would say that something is not synced
            self.all_synced()
        return "power", False

    def _noted_boot(self) -> str | None:
        """The boot in which blocks were last left unsynced; None when none were, "" when it is not known."""
        try:
            return self._note.read_text().strip()
        except FileNotFoundError:
            return None

    def all_synced(self) -> None:
        """Everything has reached the device."""
        self.files.unlink(self._note)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
