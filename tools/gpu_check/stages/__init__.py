"""The stages of the check, in the order in which they run: what must be right first, then speeds, then serving.

A stage is a module with a docstring that says what it proves, `LIMIT_S`, and `check(where, figures)`, which fills in
figures as they are found and raises what fails. `BESIDE_NEXT = True` lets the next stage start at the same time. End
the module with `stage_main(NAME, check)`.
"""

ORDER = (
    "versions",
    "native_build",
    "models",
    "kernels",
    "devices",
    "parity",
    "two_stages",
    "load",
    "copies",
    "kernel_speed",
    "decode_steps",
    "serve_small",
    "serve_large",
    "profile",
)
