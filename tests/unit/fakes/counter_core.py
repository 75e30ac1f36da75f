"""A small core for tests: counts, wants a tick one second after each count, and starts I/O that holds a number."""

from dataclasses import dataclass

from moonpool.base.scheduling.state_machine import IoEnded, PendingIo, Tick, Timers, digest_of


@dataclass(frozen=True, slots=True)
class Add:
    number: int


@dataclass(frozen=True, slots=True)
class Said:
    total: int


@dataclass(frozen=True, slots=True)
class Start:
    io: int


class Counter:
    def __init__(self) -> None:
        self.total = 0
        self.ended: list[int] = []
        self.outstanding: PendingIo[int] = PendingIo()
        self._timers: Timers[str] = Timers()

    def handle(self, now: float, event: Add | IoEnded[int] | Tick, out: list[Said | Start]) -> None:
        match event:
            case Add(number):
                self.total += number
                self._timers.set("say", now + 1.0)
                out.append(Start(self.outstanding.begin(number)))
            case IoEnded(io, result):
                assert result == self.outstanding.end(io)
                self.ended.append(io)
            case Tick():
                while self._timers.pop_due(now):
                    out.append(Said(self.total))

    def due(self) -> float | None:
        return self._timers.next()

    def check_invariants(self) -> None:
        assert self.total >= 0

    def digest(self) -> bytes:
        return digest_of(self.total, self.ended, dict(self.outstanding), self._timers.next())
