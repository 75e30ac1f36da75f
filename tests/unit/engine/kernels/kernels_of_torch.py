"""The reference in place of Triton's operations, one of which may be broken: no compiler, no interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from moonpool.engine.kernels import reference
from moonpool.engine.kernels.choice import VARIABLE

Break = Callable[[dict[str, Any]], None]


class Kernels:
    """The reference under the names of Triton's operations, which are chosen.

    Args:
        patch: undoes this.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from moonpool.engine.kernels.triton import ops  # before the variable is set: nothing is interpreted

        patch.setenv("TRITON_INTERPRET", "1")  # or Triton is not available on a CPU
        patch.setenv(VARIABLE, "triton")
        self.broken: dict[str, tuple[Break | None, Break | None]] = {}
        self.launched = 0
        self.within: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around each operation."""
        for name in ops.__all__:
            if hasattr(reference, name):
                patch.setattr(ops, name, self._kernel(name, getattr(ops, name)))

    def break_(self, name: str, *, before: Break | None = None, behind: Break | None = None) -> None:
        """Change what the operation `name` is given, or what it has written."""
        self.broken[name] = before, behind

    def _kernel(self, name: str, theirs: Callable[..., None]) -> Callable[..., None]:
        function, names = getattr(reference, name), theirs.__code__.co_varnames
        code = function.__code__
        known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

        @functools.wraps(theirs)
        def kernel(*arguments: Any, **keywords: Any) -> None:
            self.launched += 1
            given = dict(zip(names, arguments, strict=False)) | keywords
            before, behind = self.broken.get(name, (None, None))
            if before is not None:
                before(given)
            with self.within():
                function(**{key: value for key, value in given.items() if key in known})
            if behind is not None:
                behind(given)

        return kernel


def heads_swapped(given: dict[str, Any]) -> None:
    """Each head's result is another's."""
    given["out"].copy_(given["out"].roll(1, 1).clone())
