"""How many examples Hypothesis draws: all in `make test-all`, half of them in `make test`."""

import os

ALL = os.environ.get("TEST_EXAMPLES") == "all"


def examples(count: int) -> int:
    """Of `count` examples as many as this run draws; at least ten."""
    return count if ALL else max(10, count // 2)
