# mypy: allow-untyped-defs, allow-untyped-calls
"""Lets the interpreter of Triton 3.6 run beside numpy 2.4 and newer."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Make an interpreter scalar a Python number by its one element.

    Triton 3.6 calls `int` of an array with a dimension, which numpy refuses since 2.4. A Triton without a list of
    changes is older than that numpy, and left unchanged.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    theirs = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        theirs(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
