"""A cluster of the release before is upgraded under load, one service after the other: no token is lost or doubled.

The release before is the newest tag; without a tag it is the commit of a day before the newest one. Its services say
that they are one minor version behind, as far as they tell a version. Kinds are upgraded in the order that
docs/upgrade.md names and in the opposite one, so that of any two kinds each is once the newer one. Afterwards the
kvstore, which has read the folder of the release before, still has what was asked before the first upgrade.
"""

import datetime
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from moonpool.client import Client
from tests.integration.members import PROMPTS, ROOT, STREAMS, Cluster, Load, stream

ORDER = ("decode", "prefill", "kvstore", "conductor", "gateway")
VERSIONS = {"old": "0.1.0", "new": "0.2.0"}
EARLY = "what was asked before the first upgrade " * 16


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def release_before() -> str:
    """The newest tag before this commit, or a commit of a day before."""
    tag = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "HEAD^"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if tag.returncode == 0:
        return tag.stdout.strip()
    newest = datetime.datetime.fromisoformat(git("log", "-1", "--format=%cI"))
    return git("rev-list", "-1", f"--before={(newest - datetime.timedelta(days=1)).isoformat()}", "HEAD")


def checkout(folder: Path) -> None:
    """The code of the release before."""
    try:
        commit = release_before()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history of this checkout is not there")
    if not commit:
        pytest.skip("the history of this checkout is too short")
    folder.mkdir()
    with subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)


def cached_tokens(url: str) -> int:
    """How much of the early prompt need not be computed."""
    body = {"model": "tiny", "prompt": EARLY, "max_tokens": 1, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=120.0)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def paths(folder: Path) -> dict[str, str]:
    """`PYTHONPATH` of both releases, each with the version that it tells."""
    found = {}
    for name, code in (("old", folder / "old"), ("new", ROOT)):
        info = folder / f"version-{name}" / f"moonpool-{VERSIONS[name]}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: moonpool\nVersion: {VERSIONS[name]}\n")
        found[name] = f"{info.parent}{os.pathsep}{code}"
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]], ids=["engines first", "gateway first"])
def test_services_are_upgraded_one_by_one_under_load(tmp_path: Path, order: Sequence[str]) -> None:
    checkout(tmp_path / "old")
    path = paths(tmp_path)
    cluster = Cluster.planned(tmp_path)
    with cluster.running(path["old"]):
        cached_tokens(cluster.url)
        load = Load(cluster.url, [stream(cluster.url, prompt) for prompt in PROMPTS])
        with load.running():
            for kind in order:
                for member in [member for member in cluster.members if member.kind == kind]:
                    member.stop()
                    member.start(path["new"])
                    cluster.wait_complete()
                    load.wait_whole(STREAMS)
                    assert not load.faults, f"{member.name}: {load.faults}"
        assert load.faults == []
        assert cached_tokens(cluster.url) > 0, "nothing of what the release before had stored was found"
        with Client(cluster.conductors) as client:
            versions = {instance.id: instance.version for instance in client.cluster_state().instances}
    assert set(versions.values()) == {VERSIONS["new"]}, versions
