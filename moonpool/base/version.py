"""The version of this installation of Moonpool."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

COMMIT_VARIABLE = "MOONPOOL_COMMIT"
"""Environment variable with the commit that an image was built from; images set the variable."""


@cache
def installed_version() -> str:
    """Version of the installed distribution; "0" for a checkout that is not installed."""
    for name in ("moonpool", "moonpool-base"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "0"


def commit() -> str:
    """Commit that the image was built from; "" if nobody says."""
    return os.environ.get(COMMIT_VARIABLE, "")
