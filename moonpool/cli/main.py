"""The `moonpool` command: its verbs, and how it ends.

Each verb imports its modules on running, so that `moonpool generate` needs no torch and `--help` is quick.
"""

import errno
import importlib.metadata
import os
import signal
import sys
import threading
from typing import Annotated, NoReturn

import typer

from moonpool.base.config import ENGINE_PACKAGES, EXTRA_ADVICE, refuse_unknown_variables
from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc.tuning import quiet_grpc
from moonpool.cli import look_verbs, operate_verbs, predict_verbs, service_verbs, start_verbs
from moonpool.cli.options import HELP, RootGroup
from moonpool.cli.whole_words import say

app = typer.Typer(
    name="moonpool",
    cls=RootGroup,
    help="KVCache-centric serving of large language models. `moonpool VERB --help` explains a verb.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""A full or broken disk, where standard output is a file."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moonpool {importlib.metadata.version('moonpool')}")
        raise typer.Exit


@app.callback()
def moonpool(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KVCache-centric serving of large language models. `moonpool VERB --help` explains a verb."""


# The headings of `moonpool --help` come in this order.
for _group in (start_verbs, look_verbs, operate_verbs, predict_verbs, service_verbs):
    app.add_typer(_group.app)


def main() -> None:
    """Entry point: print an error with a remedy, exit with 2; a signal ends children first."""
    _open_closed_streams()
    quiet_grpc()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        refuse_unknown_variables()
        app()
    except MoonpoolError as error:
        from moonpool.cli.generate import error_advice

        said = "\n".join(filter(None, (f"moonpool: {error}", error_advice(error))))
        say(said, err=True)
        _leave(2)
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_PACKAGES:
            raise
        say(f"moonpool: this needs {error.name}: {EXTRA_ADVICE.format('engine')}", err=True)
        _leave(2)
    except OSError as error:
        if not error.strerror or (error.filename is None and error.errno not in _FULL):
            raise
        say(f"moonpool: {error.filename or 'standard output'}: {error.strerror}", err=True)
        _leave(2)
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0)


def _open_closed_streams() -> None:
    """Take the null device for a standard stream that the caller closed, as by `>&-`.

    Else the next file or pipe that the process opens would take the stream's place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - as long as the process


def _leave(status: int) -> NoReturn:
    """End the process; do not wait for threads, which may be downloading."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk, or a reader that has gone: the rest is lost
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            status = status or 1
    if any(not thread.daemon and thread is not threading.current_thread() for thread in threading.enumerate()):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
