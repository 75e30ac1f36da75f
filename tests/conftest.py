"""Settings of all tests.

One thread for torch: tiny tensors gain nothing from more, and on busy cores threads wait for one another. Hypothesis
draws the same examples each time, however slow the machine is. Engines that tests start lend cores to those of the same
test process only.
"""

import contextlib
import gc
import importlib
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from moonpool.base.rpc.tuning import tune_gc
from moonpool.cli.forks import forked_services
from tests.examples import examples

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where started programs find the tests' modules: no program of the product imports from its working folder."""
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; engines are told a number of their own
_CORES = tempfile.NamedTemporaryFile(prefix="mp-cores-")  # noqa: SIM115  # as long as this process
os.environ["MOONPOOL_CORE_PAGE"] = _CORES.name
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when gRPC is first used; servers that end are not worth a line

settings.register_profile("moonpool", deadline=None, derandomize=True, max_examples=examples(100))
settings.load_profile("moonpool")


SHARED_FOLDERS = ("decoding", "hostile", "shared")
"""Whose tests share a stack, so that one process runs all of them; elsewhere one runs the tests of a file."""


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Services and engines are forked, which saves their imports; the fork servers begin with the first of them."""
    with forked_services():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """The garbage collector does not look at what is imported and collected: that stays to the end."""
    gc.disable()
    try:
        _import_in_turns(session.config)
        return (yield)
    finally:
        gc.enable()
        tune_gc()


def _import_in_turns(config: pytest.Config) -> None:
    """Of several processes each imports another part of all test modules first.

    In a new checkout pytest rewrites the assertions of each module, which takes longer than to import all that tests
    need, and keeps what it has written: each process finds there what the others have done.
    """
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None or [Path(arg).resolve() for arg in config.args] != [ROOT / "tests"]:
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # what is wrong with a module, its collection says
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Storms take longest of all files: they come first, so that no process is busy alone at the end."""
    items.sort(key=lambda item: item.path.parent.name != "world")


def pytest_sessionfinish() -> None:
    """Lets the end of the process free what services that ran in it have frozen: Triton lists what is left."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Which tests one of several processes runs with `--dist loadfile`; None = xdist's own answer."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]  # its module names no types
        def _split_scope(self, nodeid: str) -> str:
            folder, _, file = nodeid.partition("::")[0].rpartition("/")
            return folder if folder.rpartition("/")[2] in SHARED_FOLDERS else f"{folder}/{file}"

    return Together(config, log)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for unix sockets, whose paths may have 107 bytes: `tmp_path` can be longer than that leaves."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="mp-") as folder:  # ours alone
        yield Path(folder)
