"""The conductor's streams to decode instances: starts and cancels on their way there, tokens on their way back.

One stream for all sequences of an instance, as in the service. When it breaks all of them fail, and the next order
opens a new one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from services.conductor.core.failures import Failure, Kind
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.following import Member
from simulator.cluster.sequences import Resume, Told
from simulator.kernel.calls import NOTICED_S, Calls, Wire
from simulator.kernel.clock import ps


class DecodeStream:
    """The stream to one life of a decode instance; opened on first use, and again after a break.

    Args:
        calls: carry its messages.
        decode: the instance.
        conductor: whose it is.
        number: names an opening; never used twice.
    """

    def __init__(self, calls: Calls, decode: DecodeInstance, conductor: str, number: Callable[[], int]) -> None:
        self._calls, self._decode, self._conductor, self._new_number = calls, decode, conductor, number
        self._incarnation = decode.incarnation
        self._number = 0
        self._wire: Wire | None = None
        self._followers: dict[int, Member] = {}

    def __len__(self) -> int:
        """Sequences on the stream."""
        return len(self._followers)

    def open(self) -> Wire:
        """Lets the stream be there: while it is, decode keeps what it has promised."""
        if self._wire is None or self._wire.closed:
            number = self._number = self._new_number()
            self._wire = Wire(self._calls, self._broken)
            self._wire.send(partial(self._there, lambda: self._decode.stream_opened(number, self._conductor)))
        return self._wire

    def start(self, transfer: int, followers: Sequence[Member], known: tuple[int, ...], *, compute: bool) -> None:
        """Starts a sequence, or several together, and follows each; see `DecodeInstance.start`."""
        wire, number = self.open(), self._number
        self._followers.update(enumerate(followers, transfer))
        wire.send(partial(self._there, lambda: self._decode.start(number, transfer, known, compute=compute)))

    def resume(self, order: Resume, followers: Sequence[Member]) -> None:
        """Asks for what was another conductor's, and follows it."""
        wire, number = self.open(), self._number
        self._followers.update(enumerate(followers, order.transfer))
        wire.send(partial(self._there, lambda: self._decode.resume(number, order)))

    def unfollow(self, transfer: int, width: int = 1) -> None:
        """A sequence, or several that run together, are not followed any more."""
        for number in range(transfer, transfer + width):
            self._followers.pop(number, None)

    def cancel(self, transfer: int) -> None:
        """A sequence, several that run together, or the promise for them, are not wanted."""
        self.open().send(partial(self._there, lambda: self._decode.cancel(transfer)))

    def lost(self, why: str) -> None:
        """The instance is lost."""
        if self._wire is not None:
            self._wire.close()
        self._fail(why)

    def abandon(self) -> None:
        """The conductor is lost; the instance notices that after a while."""
        if self._wire is not None and not self._wire.closed:
            number = self._number
            self._wire.close()
            closed = partial(self._there, lambda: self._decode.stream_closed(number))
            self._calls.world.after(ps(NOTICED_S), lambda _: closed())

    # From the instance

    def tell(self, number: int, news: list[Told]) -> None:
        """The instance sends tokens."""
        if self._wire is not None and number == self._number:
            self._wire.send(lambda: self._hear(news), back=True)

    def refuse(self, number: int, transfer: int, failure: Failure) -> None:
        """The instance says that a sequence cannot go on."""
        if self._wire is not None and number == self._number:
            self._wire.send(lambda: self._failed(transfer, failure), back=True)

    def _hear(self, news: list[Told]) -> None:
        for told in news:
            follower = self._followers.get(told.number)
            if follower is not None:
                if told.over:
                    del self._followers[told.number]
                follower.tokens(told.made, over=told.over)

    def _failed(self, transfer: int, failure: Failure) -> None:
        mine = [follower for number, follower in self._followers.items() if number - follower.choice == transfer]
        if mine:
            mine[0].fail(failure)

    def _there(self, deliver: Callable[[], None]) -> None:
        """At the instance, if it is there still."""
        if self._decode.up and self._decode.incarnation == self._incarnation:
            deliver()

    def _broken(self) -> None:
        number = self._number
        self._there(lambda: self._decode.stream_closed(number))
        self._fail("its stream broke")

    def _fail(self, why: str) -> None:
        followers, self._followers = self._followers, {}
        for follower in followers.values():
            follower.fail(Failure(Kind.STREAM, why))


class DecodeStreams:
    """One conductor's streams to all decode instances."""

    def __init__(
        self, calls: Calls, decodes: Mapping[str, DecodeInstance], conductor: str, number: Callable[[], int]
    ) -> None:
        self._calls, self._conductor, self._number, self._decodes = calls, conductor, number, decodes
        self._streams: dict[str, DecodeStream] = {}

    def __len__(self) -> int:
        """Sequences on all streams."""
        return sum(map(len, self._streams.values()))

    def get(self, decode: str) -> DecodeStream:
        """The stream to the present life of an instance."""
        if decode not in self._streams:
            self._streams[decode] = DecodeStream(self._calls, self._decodes[decode], self._conductor, self._number)
        return self._streams[decode]

    def lost(self, decode: str) -> None:
        """The instance is lost: its sequences fail."""
        stream = self._streams.pop(decode, None)
        if stream is not None:
            stream.lost("its instance is lost")

    def abandon(self) -> None:
        """The conductor is lost."""
        for stream in self._streams.values():
            stream.abandon()
