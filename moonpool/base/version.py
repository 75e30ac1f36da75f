"""The version of this installation of Moonpool, and which versions work together."""

import os
import re
from functools import cache
from importlib import metadata

COMMIT_VARIABLE = "MOONPOOL_COMMIT"
"""Environment variable with the commit that an image was built from; images set the variable."""


@cache
def installed_version() -> str:
    """Version of the installed distribution; "0" for a checkout that is not installed."""
    for name in ("moonpool", "moonpool-base"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "0"


def version_conflict(own: str, other: str) -> str:
    """Why two versions do not work together; "" if they do.

    Two versions work together if their major numbers are the same and their minor numbers differ by one at most. A
    version that is not told, or is no number, is taken.
    """
    ours, theirs = _minor(own), _minor(other)
    if ours is None or theirs is None or (ours[0] == theirs[0] and abs(ours[1] - theirs[1]) <= 1):
        return ""
    return (
        f"version {other} does not work with {own}: in a cluster, versions are at most one minor apart; upgrade one "
        "minor after the other"
    )


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def commit() -> str:
    """Commit that the image was built from; "" if nobody says."""
    return os.environ.get(COMMIT_VARIABLE, "")
