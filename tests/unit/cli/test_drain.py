"""`moonpool drain` waits until nothing runs at the instance."""

from moonpool.cli.drain import drained
from moonpool.client.testing import FakeConductor
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2


def state(*, running: int, draining: bool) -> pb.ClusterStateResponse:
    """A cluster with one decode instance."""
    member = pb.InstanceState(instance=kv_pb2.Instance(id="decode-0", kind=kv_pb2.INSTANCE_KIND_DECODE))
    member.load.running, member.load.draining = running, draining
    return pb.ClusterStateResponse(instances=[member])


def test_waits_until_the_instance_says_that_nothing_runs() -> None:
    fake, now = FakeConductor(), 0.0
    steps = [state(running=2, draining=True), state(running=0, draining=True)]
    fake.state.CopyFrom(state(running=2, draining=False))

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        fake.state.CopyFrom(steps.pop(0))

    with fake.client() as client:
        assert drained(client, "decode-0", 10.0, lambda: now, pause)
        assert (now, steps) == (1.0, [])
        assert drained(client, "has-left", 0.0)


def test_says_when_the_time_is_over() -> None:
    fake, now = FakeConductor(), 0.0
    fake.state.CopyFrom(state(running=1, draining=True))

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    with fake.client() as client:
        assert not drained(client, "decode-0", 2.0, lambda: now, pause)
    assert now == 2.0
