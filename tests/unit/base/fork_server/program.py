"""A program that tests start: `python -m tests.unit.base.fork_server.program WHAT`; tells of itself in one line."""

import atexit
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

from moonpool.base.fork_server import Program, engine_started, start_worker


def children() -> list[int]:
    """Of this process."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def state() -> dict[str, object]:
    """What a parent chooses or a child takes over."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "argv": sys.argv,
        "path": sys.path[0],
        "flags": list(sys.flags),
        "name": __name__,
        "module": sys.modules["__main__"].__file__,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "session": os.getsid(0),
        "own group": os.getpgrp() == os.getpid(),
        "parent": os.getppid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "status": {name: status[name] for name in ("Umask", "SigBlk", "SigIgn", "SigCgt", "Threads", "Name")},
        "files": sorted(os.listdir("/proc/self/fd"), key=int),
        "read": os.read(0, 1).decode(),
        "shown": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(),
    }


def main(what: str) -> None:
    """Tells of itself, then ends as the argument says."""
    told = {"forked": "tabnanny" in sys.modules, "draw": random.random(), "pid": os.getpid(), "state": state()}
    told["optimised"] = sys.flags.optimize
    if what == "engine":
        worker = start_worker(Program(__spec__.name, ["wait"], os.environ, stdout=2, stderr=2))
        engine_started()
        told |= {"worker": worker.pid, "children": children()}
        worker.kill()
        told |= {"worker's end": worker.wait(60)}
    print(json.dumps(told), flush=True)
    match what:
        case "wait":
            signal.pause()
        case "seven":
            sys.exit(7)
        case "text":
            sys.exit("what is wrong")
        case "defect":
            raise KeyError("a defect")
        case "handlers":
            atexit.register(print, "handled")
            threading.Timer(0.0, print, ["a thread's last words"]).start()


if __name__ == "__main__":
    main(sys.argv[1])
