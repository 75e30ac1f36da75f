"""Transfers to decode: opened when a job starts, fed while it is computed, closed when all of it has left."""

from services.prefill.core.actions import AwaitVerdict, CloseTransfer, OpenTransfer, Piece, SendSlices
from services.prefill.core.outgoing import Outgoing, Span
from services.prefill.core.state import Job, SendFlight, State, Table, TransferFlight


class Sends:
    """Sends the KV of jobs, at most one batch of each at a time."""

    def __init__(self, state: State) -> None:
        self._state = state

    def open(self, job: Job) -> None:
        """A job has started: its transfer is opened, so that its first layer need not wait for that."""
        if job.outgoing is not None:
            job.outgoing.io = self._state.begin(TransferFlight(job.number, opens=True))
            self._state.do(OpenTransfer(job.outgoing.io, job.number))

    def add(self, job: Job, layer: int, first: int, end: int, step: int | None) -> None:
        """Blocks [first, end) of a layer are whole."""
        if job.outgoing is not None:
            job.outgoing.add(layer, first, end, step)
            self._pump(job, job.outgoing)

    def leading(self, job: Job, blocks: int) -> None:
        """The leading blocks are whole in all layers."""
        if job.outgoing is not None:
            for layer in range(self._state.settings.layers):
                job.outgoing.add(layer, 0, blocks, None)
            self._pump(job, job.outgoing)

    def take_back(self, job: Job, first: int) -> None:
        """Blocks from `first` on will be computed anew, but not before a batch that may read them has left."""
        outgoing = job.outgoing
        if outgoing is None:
            return
        outgoing.take_back(first)
        if outgoing.io is not None and isinstance(self._state.ios.get(outgoing.io), SendFlight):
            job.settling.add(outgoing.io)

    def finish(self, job: Job) -> bool:
        """All of the job is computed; returns whether nothing has to leave, or to be waited for."""
        if job.outgoing is None:
            self._state.unbind(job)
            return True
        assert job.outgoing.whole, "a slice was never handed over"
        self._pump(job, job.outgoing)
        return False

    def opened(self, number: int) -> None:
        """A transfer is open; that of a job which has ended meanwhile is given up."""
        job = self._state.jobs.get(number)
        if job is None or job.outgoing is None:
            self._state.do(CloseTransfer(number, aborted=True))
            return
        job.outgoing.io, job.outgoing.open = None, True
        self._pump(job, job.outgoing)

    def sent(self, job: Job, nbytes: int, seconds: float) -> None:
        """A batch has left."""
        assert job.outgoing is not None
        job.outgoing.io = None
        job.outgoing.sent_bytes += nbytes
        self._state.tracker.observe_transfer(nbytes, seconds)
        self._pump(job, job.outgoing)

    def give_up(self, job: Job) -> None:
        """The job ends before its verdict."""
        if job.outgoing is not None:
            self._state.cancel(job.outgoing.io)
            if job.outgoing.open:
                self._state.do(CloseTransfer(job.number, aborted=True))

    def _pump(self, job: Job, outgoing: Outgoing) -> None:
        """Sends what waits; after the last slice closes the transfer, for whose verdict no block is needed."""
        if outgoing.io is not None or not outgoing.open:
            return
        table, state = job.table, self._state
        if outgoing.pending and table is not None:
            pieces = tuple([_piece(span, table) for span in outgoing.take(state.settings.slice_bytes)])
            io = outgoing.io = state.begin(SendFlight(job.number, (table,)))
            state.do(SendSlices(io, job.number, pieces))
        elif job.finished:
            self._state.do(CloseTransfer(job.number, aborted=False))
            self._state.unbind(job)
            outgoing.io = self._state.begin(TransferFlight(job.number, opens=False))
            self._state.do(AwaitVerdict(outgoing.io, job.number, self._state.settings.verdict_timeout_s))


def _piece(span: Span, table: Table) -> Piece:
    return Piece(span.layer, span.first, tuple(table.blocks[span.first : span.end]), span.step)
