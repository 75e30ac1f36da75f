"""What conductors tell of their tenants comes to the other conductors, once for each change."""

import asyncio

from moonpool.base.cluster import ClusterMembership, HeldKeys, InstanceReport
from moonpool.base.cluster.tenant_activity import KEPT_S, MAX_ROWS, MAX_STARTS, TenantActivityBoard
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.server import serving
from moonpool.base.scheduling.fair_share import MAX_TENANTS
from moonpool.v1 import conductor_pb2, kv_pb2
from tests.unit.fakes.conductor import FakeConductor

WAIT_S = 60.0
SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
Told = dict[tuple[str, int], dict[str, int]]


class Board:
    """A board, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.board = TenantActivityBoard(lambda: self.now)
        self._numbers: dict[tuple[str, int], int] = {}
        self._since: dict[tuple[str, int], int] = {}

    def tell(self, name: str, start: int = 1, **requests: int) -> None:
        """A conductor tells of some tenants."""
        number = self._numbers[name, start] = self._numbers.get((name, start), 0) + 1
        rows = [conductor_pb2.TenantActivity(tenant=tenant, requests=count) for tenant, count in requests.items()]
        self.board.take(conductor(name, start), conductor_pb2.ConductorActivity(number=number, tenants=rows))

    def uses(self, name: str, start: int = 1) -> list[conductor_pb2.ConductorActivity]:
        """What is passed on to a conductor."""
        found, self._since[name, start] = self.board.news(conductor(name, start), self._since.get((name, start), 0))
        return found

    def news(self, name: str, start: int = 1) -> Told:
        """Requests by tenant, which are passed on to a conductor."""
        return {
            (use.conductor, use.epoch): {row.tenant: row.requests for row in use.tenants}
            for use in self.uses(name, start)
        }


def conductor(name: str, start: int) -> kv_pb2.Instance:
    return kv_pb2.Instance(id=name, epoch=start)


def test_each_row_is_passed_on_once_to_each_other_conductor() -> None:
    board = Board()
    board.tell("a", ann=1, bob=2)
    assert board.news("a") == {}
    assert board.news("b") == {("a", 1): {"ann": 1, "bob": 2}}
    board.tell("a", ann=3)
    board.tell("b", cid=1)
    assert board.news("b") == {("a", 1): {"ann": 3}}
    assert board.news("c") == {("a", 1): {"ann": 3, "bob": 2}, ("b", 1): {"cid": 1}}
    assert board.news("c") == {("a", 1): {}, ("b", 1): {}}, "that they are there is told all the same"


def test_a_conductor_that_begins_anew_gets_its_own_rows() -> None:
    board = Board()
    board.tell("a", ann=5)
    assert board.news("a", 2) == {("a", 1): {"ann": 5}}


def test_ages_are_of_the_instance() -> None:
    board = Board()
    board.tell("a", ann=5)
    board.now += 2.0
    board.tell("a")
    board.now += 1.0
    [use] = board.uses("b")
    assert (use.age_s, [row.age_s for row in use.tenants]) == (1.0, [3.0])


def test_a_late_message_changes_nothing() -> None:
    board = Board()
    board.tell("a", ann=5)
    old = conductor_pb2.ConductorActivity(number=1, tenants=[conductor_pb2.TenantActivity(tenant="ann", requests=1)])
    board.board.take(conductor("a", 1), old)
    assert board.news("b") == {("a", 1): {"ann": 5}}


def test_what_is_kept_is_bounded() -> None:
    board = Board()
    for number in range(MAX_STARTS + 5):
        board.now += 1.0
        board.tell(f"c{number}", ann=1)
    assert set(board.news("b")) == {(f"c{number}", 1) for number in range(5, MAX_STARTS + 5)}
    board.now += KEPT_S + 0.5
    assert board.news("b") == {}
    board.tell("a", **{f"t{number}": 1 for number in range(MAX_TENANTS + 3)})
    found: list[str] = []
    for left in range(MAX_TENANTS // MAX_ROWS, 0, -1):
        [use] = board.uses("b")
        assert (len(use.tenants), use.more) == (MAX_ROWS, left > 1)
        found += [row.tenant for row in use.tenants]
    assert found == [f"t{number}" for number in range(3, MAX_TENANTS + 3)]
    assert board.news("b") == {("a", 1): {}}


async def test_an_instance_passes_on_what_one_conductor_tells_to_the_other() -> None:
    row = conductor_pb2.TenantActivity(tenant="ann", requests=7)
    told = conductor_pb2.JoinResponse(activity=conductor_pb2.ConductorActivity(number=1, tenants=[row]))
    first, second = FakeConductor(name="first", orders=[told]), FakeConductor(name="second")
    async with (
        serving("127.0.0.1:0", [(SERVICE, first)], grace_s=0.0) as server,
        serving("127.0.0.1:0", [(SERVICE, second)], grace_s=0.0) as other,
        Channels() as channels,
    ):
        hello = conductor_pb2.JoinHello(instance=kv_pb2.Instance(id="it", epoch=1))
        report = InstanceReport(hello, conductor_pb2.LoadReport, HeldKeys(1, lambda _: []))
        joining, stopping = ClusterMembership(channels, [server.address, other.address], report), asyncio.Event()
        running = asyncio.ensure_future(joining.run(stopping))

        def heard(conductor: FakeConductor) -> Told:
            return {
                (use.conductor, use.epoch): {row.tenant: row.requests for row in use.tenants}
                for load in conductor.loads
                for use in load.activities
                if use.tenants
            }

        async with asyncio.timeout(WAIT_S):
            while not heard(second):
                second.has_load.clear()
                joining.notify()
                await second.has_load.wait()
        assert heard(second) == {("first", 1): {"ann": 7}}
        assert heard(first) == {}
        assert {load.conductors for load in second.loads} == {2}
        stopping.set()
        await running
