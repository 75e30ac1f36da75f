"""Starts a module of a test in the place of a service."""

import dataclasses

from moonpool.base.fork_server import ChildProcess, Launcher, Program, execute


def instead(module: str) -> Launcher:
    """A launcher that runs `module`, found by PYTHONPATH, whatever service is to be started."""

    def launch(program: Program) -> ChildProcess:
        return execute(dataclasses.replace(program, module=module))

    return launch
