"""The `moonpool` command before its modules are imported: Ctrl-C then ends the command without a traceback."""

import signal


def main() -> None:
    """Entry point of the installed command."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:  # not in the background of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moonpool.cli.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
