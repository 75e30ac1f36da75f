"""The PrefillService contract: translates messages into calls of a `PrefillInstance` and back."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.instance import PrefillInstance

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer:
    """Serves one prefill instance. `ReadKV` is not built yet: the server answers so itself."""

    def __init__(self, instance: PrefillInstance, gauges: Gauges) -> None:
        self._instance = instance
        self._gauges = gauges

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Computes one prompt; leaving the call cancels it."""
        runner = self._instance.runner
        predicted = runner.drain_s()
        job = self._instance.submit(request)
        try:
            accepted = prefill_pb2.PrefillAccepted(predicted_start_s=predicted, number=int(job.key))
            yield prefill_pb2.PrefillResponse(accepted=accepted)
            while (event := await job.next()) is not None:
                yield event
        finally:
            runner.cancel(job)

    async def Cancel(  # noqa: N802
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        """Cancels a prefill by request id."""
        runner = self._instance.runner
        jobs = runner.find(request.request_id)
        outcome = kv_pb2.CANCEL_OUTCOME_UNKNOWN
        if jobs:
            started = any(job.started.is_set() for job in jobs)
            outcome = kv_pb2.CANCEL_OUTCOME_IN_FLIGHT if started else kv_pb2.CANCEL_OUTCOME_BEFORE_START
        for job in jobs:
            runner.cancel(job)
        return prefill_pb2.CancelResponse(outcome=outcome)

    async def PrefillStats(  # noqa: N802
        self, request: prefill_pb2.PrefillStatsRequest, context: Context
    ) -> prefill_pb2.PrefillStatsResponse:
        """Everything the instance holds."""
        return prefill_pb2.PrefillStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())
