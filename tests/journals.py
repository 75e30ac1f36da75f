"""Journals of the services that tests start: each must rerun to the actions it recorded."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from moonpool.base.runtime.journal import journal_files, rerun
from moonpool.cli.stack import LocalStack, ServiceProcess, StackPlan

WITHOUT_CORE = ("kvstore", "gateway")
"""Services that keep no journal."""


DENSE, SPARSE = 5, 20
"""A core's invariants are looked at after so many events, and after the last one. After each event that takes 4 to 28
times as long as the rerun; the worlds around the cores do."""


def check_journals(folder: Path, *, invariants: str = "") -> int:
    """Reruns every journal below a folder, and looks at the cores' invariants; returns the number of events.

    Args:
        folder: of all journals.
        invariants: looked at often, of each service in whose folder's name this stands: see `DENSE`.

    Raises:
        AssertionError: an action is not the recorded one, or an invariant does not hold.
        JournalError: a journal is damaged.
    """
    events = 0
    for kept in sorted({path.parent for path in folder.rglob("*.[01]")}):
        for path in journal_files(kept):
            again = rerun(path, check=DENSE if invariants and invariants in kept.name else SPARSE)
            assert again.difference is None, f"{path}: other actions when rerun: {again.difference}"
            again.core.check_invariants()
            events += again.events
    return events


class JournaledStack(LocalStack):
    """A local stack whose journals are rerun when it is left without an error, those of killed services too.

    Args:
        plan: of the stack.
        invariants: a kind of service whose core's invariants are looked at often.
    """

    def __init__(self, plan: StackPlan, *, invariants: str = "") -> None:
        super().__init__(plan)
        self._invariants = invariants
        self._lives = itertools.count()
        self.journals: dict[str, Path] = {}
        """Of the latest life of each service."""

    def spawn(self, kind: str, service_id: str, arguments: Sequence[str]) -> ServiceProcess:
        """Starts a service; each of its lives has a journal of its own."""
        if kind not in WITHOUT_CORE:
            folder = self.journals[service_id] = self._journals / f"{next(self._lives)}-{kind}"
            arguments = [*arguments, "--set", f"journal_dir={folder}"]
        return super().spawn(kind, service_id, arguments)

    @property
    def _journals(self) -> Path:
        return self.plan.data_dir / "stack-journals"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            assert check_journals(self._journals, invariants=self._invariants) > 0, "no service kept a journal"
