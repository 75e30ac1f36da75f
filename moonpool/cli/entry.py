"""The `moonpool` command before its modules are imported: Ctrl-C then ends the command without a traceback."""

import os
import sys


def main() -> None:
    """Run the installed command."""
    _leave_out_the_scripts_folder()
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
