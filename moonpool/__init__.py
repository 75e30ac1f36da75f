"""Moonpool: KVCache-centric serving of large language models. `docs/architecture.md` maps the folders."""

import os
import sys


def _leave_out_the_working_folder() -> None:
    """`python -m moonpool...` puts the working folder before all packages: import nothing of ours from there.

    Python looks for the module then, and has put no file's name into `sys.argv[0]` yet. What is imported here has been
    imported by Python itself before.
    """
    if sys.argv[:1] != ["-m"] or sys.flags.safe_path:
        return
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        here = os.getcwd()
    except OSError:  # the folder is gone
        return
    if sys.path[0] == here != own:
        del sys.path[0]


_leave_out_the_working_folder()
