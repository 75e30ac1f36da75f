"""Engines are added and taken away under load, 1, 3, 1 of each kind: no token is lost or doubled."""

import time
from pathlib import Path

import pytest

from moonpool.client import Client
from tests.integration.members import PROMPTS, ROOT, START_S, STREAMS, Cluster, Load, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MOST = 3


def wait_used(cluster: Cluster, names: set[str]) -> None:
    """Wait until each of these decode instances has answered something."""
    end = time.monotonic() + START_S
    with Client(cluster.conductors) as client:
        while names:
            names = names - {instance.id for instance in client.cluster_state().instances if instance.running}
            assert time.monotonic() < end, names
            time.sleep(0.02)


def test_engines_come_and_go_under_load(tmp_path: Path) -> None:
    cluster = Cluster.planned(tmp_path, engines=MOST)
    further = [
        member for member in cluster.members if member.name.endswith(("-1", "-2")) and member.kind != "conductor"
    ]
    cluster.members = [member for member in cluster.members if member not in further]
    path = f"{tmp_path}:{ROOT}"
    with cluster.running(path):
        load = Load(cluster.url, [stream(cluster.url, prompt) for prompt in PROMPTS])
        with load.running():
            load.wait_whole(STREAMS)
            for member in further:
                cluster.members.append(member)
                member.start(path)
            cluster.wait_complete()
            wait_used(cluster, {member.name for member in further if member.kind == "decode"})
            load.wait_whole(2 * STREAMS)
            for member in further:
                member.stop()
                cluster.members.remove(member)
                load.wait_whole(1)
            load.wait_whole(STREAMS)
        assert load.faults == []
        assert load.whole > 4 * STREAMS
