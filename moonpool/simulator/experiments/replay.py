"""Another policy on a recorded journal: the other policy's decision at each recorded decision."""

from collections.abc import Sequence
from pathlib import Path

from moonpool.base.errors import ConfigError
from moonpool.base.runtime.journal import event_of, journal_files, read_journal
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.placement.policies.registry import load_policy
from moonpool.simulator.experiments.frame import Progress, Result, Row
from moonpool.simulator.experiments.report import Chart, digits

UNKNOWN = (
    "Each decision meets the queues and caches that the recorded policy has left, not those that the other would have.",
    "Differences are predicted, in the queues that the recorded policy has left; the other choices were not measured.",
    "Requests that were never asked, or came later because answers were slow, are those of the recording.",
)
"""What a replay cannot know."""


def replay(path: Path, policies: Sequence[str], progress: Progress, module: str = "") -> Result:
    """A row for each policy, over all conductors' journals at `path`.

    Args:
        path: a journal's file, or a folder of journals.
        policies: asked beside the recorded policy, each as the conductor's flag names the policy.
        progress: called with each policy.
        module: module with further classes that the journals may name; the module's code runs.

    Raises:
        JournalError: no journal, or a damaged journal.
        ConfigError: a policy is unknown, or no journal is a conductor's.
    """
    rows = []
    for policy in policies:
        rows.append(_row(path, policy, module))
        progress(f"{policy}: {rows[-1]['agreed']} of {rows[-1]['decisions']} decisions are the same")
    points = [(place, float(str(row["agreed_share"]))) for place, row in enumerate(rows)]
    chart = Chart("Same decisions as recorded", "", "share", {"agreed": points}, names=tuple(policies))
    return Result("replay", {"journal": str(path), "cannot_know": list(UNKNOWN)}, rows, chart)


def _row(path: Path, policy: str, module: str) -> Row:
    modules = [module] if module else []
    decisions, agreed, sooner_s, measured, lost_s = 0, 0, 0.0, 0, 0.0
    for file in journal_files(path):
        core, entries = read_journal(file, modules)
        if not isinstance(core, ConductorCore):
            continue
        prefills, totals = core.cluster.prefills, core.cluster.hindsight.prefill.totals
        prefills.shadow_policy = load_policy(policy)
        before = prefills.shadow.decisions, prefills.shadow.agreed, prefills.shadow.sooner_s
        regretted = totals.placements, totals.lost_s
        for number, entry in enumerate(entries, 1):
            with event_of(file, number):
                core.handle(entry.now, entry.event, [])
        decisions += prefills.shadow.decisions - before[0]
        agreed += prefills.shadow.agreed - before[1]
        sooner_s += prefills.shadow.sooner_s - before[2]
        measured += totals.placements - regretted[0]
        lost_s += totals.lost_s - regretted[1]
    if not decisions:
        raise ConfigError("journal", f"{path} has no decision of a conductor")
    return {
        "policy": policy,
        "decisions": decisions,
        "agreed": agreed,
        "agreed_share": digits(agreed / decisions),
        "predicted_sooner_mean_s": digits(sooner_s / decisions),
        "recorded_regret_mean_s": digits(lost_s / measured) if measured else 0.0,
    }
