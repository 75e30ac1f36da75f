"""Transfers of prompts' KV to decode."""

from moonpool.engine.prefill.core.actions import AwaitVerdict, CloseTransfer, LayerBlocks, OpenTransfer, SendSlices
from moonpool.engine.prefill.core.in_flight import SendFlight, TransferFlight
from moonpool.engine.prefill.core.outgoing_kv import BlockSpan, OutgoingKV
from moonpool.engine.prefill.core.request import PrefillRequest
from moonpool.engine.prefill.core.state import PrefillState
from moonpool.engine.scheduler.block_table import BlockTable


class OutgoingTransfers:
    """Sends requests' KV, one batch per request at a time."""

    def __init__(self, state: PrefillState) -> None:
        self._state = state

    def open(self, request: PrefillRequest) -> None:
        """Open a starting request's transfer, so that the first layer need not wait for the opening."""
        if request.outgoing is not None:
            request.outgoing.io = self._state.ios.begin(TransferFlight(request.id, opens=True))
            self._state.act(OpenTransfer(request.outgoing.io, request.id))

    def add(self, request: PrefillRequest, layer: int, first: int, end: int, step: int | None) -> None:
        """Send a layer's blocks [first, end), which are whole."""
        if request.outgoing is not None:
            request.outgoing.add(layer, first, end, step)
            self._pump(request, request.outgoing)

    def leading(self, request: PrefillRequest, blocks: int) -> None:
        """Send the leading blocks, which are whole in all layers."""
        if request.outgoing is not None:
            for layer in range(self._state.settings.layers):
                request.outgoing.add(layer, 0, blocks, None)
            self._pump(request, request.outgoing)

    def take_back(self, request: PrefillRequest, first: int) -> None:
        """Note that blocks from `first` on will be computed again, once every batch that may read them was sent."""
        outgoing = request.outgoing
        if outgoing is None:
            return
        outgoing.take_back(first)
        if outgoing.io is not None and isinstance(self._state.ios.get(outgoing.io), SendFlight):
            request.blocked_by.add(outgoing.io)

    def finish(self, request: PrefillRequest) -> bool:
        """Return the request is computed; returns whether no KV is left to send or wait for."""
        if request.outgoing is None:
            self._state.unbind(request)
            return True
        assert request.outgoing.whole, "a slice was never queued"
        self._pump(request, request.outgoing)
        return False

    def opened(self, number: int) -> None:
        """Begin to send over an open transfer; abort it if the request has ended meanwhile."""
        request = self._state.requests.get(number)
        if request is None or request.outgoing is None:
            self._state.act(CloseTransfer(number, aborted=True))
            return
        request.outgoing.io, request.outgoing.open = None, True
        self._pump(request, request.outgoing)

    def sent(self, request: PrefillRequest, nbytes: int, seconds: float) -> None:
        """A batch was sent."""
        assert request.outgoing is not None
        request.outgoing.io = None
        request.outgoing.sent_bytes += nbytes
        self._state.tracker.observe_transfer(nbytes, seconds)
        self._pump(request, request.outgoing)

    def give_up(self, request: PrefillRequest) -> None:
        """Abort the transfer of a request that ends before decode's verdict."""
        if request.outgoing is not None:
            self._state.cancel(request.outgoing.io)
            if request.outgoing.open:
                self._state.act(CloseTransfer(request.id, aborted=True))

    def _pump(self, request: PrefillRequest, outgoing: OutgoingKV) -> None:
        """Send queued slices; after the last slice closes the transfer. The verdict needs no block."""
        if outgoing.io is not None or not outgoing.open:
            return
        table, state = request.table, self._state
        if outgoing.pending and table is not None:
            pieces = tuple([_layer_blocks(span, table) for span in outgoing.take(state.settings.slice_bytes)])
            io = outgoing.io = state.ios.begin(SendFlight(request.id, (table,)))
            state.act(SendSlices(io, request.id, pieces))
        elif request.finished:
            self._state.act(CloseTransfer(request.id, aborted=False))
            self._state.unbind(request)
            outgoing.io = self._state.ios.begin(TransferFlight(request.id, opens=False))
            self._state.act(AwaitVerdict(outgoing.io, request.id, self._state.settings.verdict_timeout_s))


def _layer_blocks(span: BlockSpan, table: BlockTable) -> LayerBlocks:
    return LayerBlocks(span.layer, span.first, tuple(table.blocks[span.first : span.end]), span.step)
