"""The check's stages in running order: correctness first, then speeds, then serving.

A stage is a module with a docstring that says what the stage proves, `LIMIT_S`, and `check(where, figures)`, which
fills in figures as found and raises failures. `BESIDE_NEXT = True` lets the next stage start at the same time. End the
module with `stage_main(NAME, check)`.
"""

ORDER = (
    "versions",
    "native_build",
    "models",
    "kernels",
    "devices",
    "families",
    "parity",
    "two_stages",
    "two_ranks",
    "load",
    "copies",
    "kernel_speed",
    "decode_steps",
    "serve_small",
    "serve_large",
    "profile",
    "other_engines",
)
