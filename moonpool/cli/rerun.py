"""`moonpool rerun`: feed a journal's events to the core again and compare the actions."""

import json
import traceback
from pathlib import Path

from moonpool.base.runtime.journal import CoreError, Rerun, ShowEvent, journal_files, rerun


def run_rerun(path: Path, *, events: bool, check: bool, as_json: bool, policy: str = "") -> int:
    """Rerun all files at `path`; return 1 when an action differs.

    Args:
        path: the journal.
        events: print each event with the actions.
        check: look at invariants.
        as_json: print JSON.
        policy: MODULE or MODULE:OBJECT of a policy whose classes the journal may name; the module's code runs.

    Raises:
        JournalError: the journal is missing or damaged, or the core fails.
    """
    say = _print_result_json if as_json else _print_result
    results = []
    modules = [policy.partition(":")[0]] if policy else []
    for file in journal_files(path):
        try:
            result = rerun(file, _event_printer(file) if events else None, check=check, modules=modules)
        except CoreError as failed:  # a defect that was recorded: whoever mends it wants to see where
            traceback.print_exception(failed.__cause__)
            raise
        results.append(result)
        say(result)
    return int(any(result.difference for result in results))


def _event_printer(file: Path) -> ShowEvent:
    def show(index: int, entry: object, actions: object) -> None:
        print(f"{file.name} {index}: {entry}\n    -> {actions}")

    return show


def _print_result(result: Rerun) -> None:
    if result.difference is None:
        print(f"{result.path}: {result.events} events, all actions equal")
        return
    differs = result.difference
    print(f"{result.path}: event {differs.index} gives other actions")
    print(f"  at {differs.entry.now:.6f} s: {differs.entry.event}")
    print("\n".join(f"  now: {action}" for action in differs.actions) or "  now: no action")


def _print_result_json(result: Rerun) -> None:
    differs = result.difference
    print(
        json.dumps(
            {
                "journal": str(result.path),
                "events": result.events,
                "equal": differs is None,
                "differs_at": differs.index if differs else None,
                "digest": result.core.digest().hex(),
            }
        )
    )
