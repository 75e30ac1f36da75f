"""Flags of a service that is driven by a core: its journal."""

import os
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from moonpool.config import ServiceConfig
from moonpool.drive.journal import JournalWriter


class CoreServiceConfig(ServiceConfig):
    """Settings of every service with a core."""

    journal_dir: Path | None = Field(
        None,
        description="folder for a journal of all decisions, for `moonpool rerun`; an earlier one there is overwritten;"
        " {pid} stands for the process's number; default: none is kept",
    )
    journal_bytes: int = Field(64 << 20, ge=1 << 16, description="size of the journal's two files together")

    @field_validator("journal_dir", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        return None if value in ("", None) else str(value).replace("{pid}", str(os.getpid()))

    def journal(self) -> JournalWriter | None:
        """A new journal, named as the instance; None when none is kept."""
        if self.journal_dir is None:
            return None
        return JournalWriter(self.journal_dir, self.id, self.journal_bytes)
