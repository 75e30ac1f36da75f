"""The `moonpool` command before its modules are imported: Ctrl-C then ends the command without a traceback."""

import os
import sys


def main() -> None:
    """Run the installed command."""
    _leave_out_the_scripts_folder()
    _leave_out_empty_parts()
    import signal

    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:  # not in the background of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moonpool.cli.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave_out_the_scripts_folder() -> None:
    """Import nothing that lies beside the script: the folder of all commands may be anybody's to write."""
    beside = "", os.path.dirname(os.path.realpath(sys.argv[0]))
    if not sys.flags.safe_path and sys.path[0] in beside:
        del sys.path[0]


def _leave_out_empty_parts() -> None:
    """Import and load nothing from the working folder, unless somebody names that folder.

    `PYTHONPATH=$PYTHONPATH:/my/code` leaves an empty part where the variable was not set. An empty part is the working
    folder: for Python, and in LD_LIBRARY_PATH for the system's loader.
    """
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        parts = os.environ.get(name, "").split(os.pathsep)
        kept = [part for part in parts if part]
        if len(kept) == len(parts):
            continue
        if kept:
            os.environ[name] = os.pathsep.join(kept)
        else:
            os.environ.pop(name, None)
        if name == "PYTHONPATH" and len(parts) > 1:  # one empty part is a variable that is not set
            _leave_out_the_working_folder(kept)


def _leave_out_the_working_folder(named: list[str]) -> None:
    try:
        here = os.getcwd()
    except OSError:  # the folder is gone
        return
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if here not in (own, *map(os.path.abspath, named)):
        sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
