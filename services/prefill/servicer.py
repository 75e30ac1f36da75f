"""The PrefillService contract: translates messages into calls of a `PrefillInstance` and back."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.instance import PrefillInstance

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer:
    """Serves one prefill instance."""

    def __init__(self, instance: PrefillInstance, gauges: Gauges) -> None:
        self._instance = instance
        self._gauges = gauges

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Computes one prompt; leaving the call cancels it."""
        taken = await self._instance.submit(request)
        try:
            while (event := await taken.next()) is not None:
                yield event
        finally:
            self._instance.cancel(taken)

    async def ReadKV(  # noqa: N802
        self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: Context
    ) -> None:
        """Another instance reads blocks of the pool."""
        await self._instance.reads.serve(requests, context)

    async def Cancel(  # noqa: N802
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        """Cancels a prefill by request id."""
        found = self._instance.shell.find(request.request_id)
        read = self._instance.intake.cancel(request.request_id)
        outcome = kv_pb2.CANCEL_OUTCOME_BEFORE_START if read else kv_pb2.CANCEL_OUTCOME_UNKNOWN
        if found:
            started = any(self._instance.core.started(one.number) for one in found)
            outcome = kv_pb2.CANCEL_OUTCOME_IN_FLIGHT if started else kv_pb2.CANCEL_OUTCOME_BEFORE_START
        for one in found:
            self._instance.cancel(one)
        return prefill_pb2.CancelResponse(outcome=outcome)

    async def Forget(  # noqa: N802
        self, request: kv_pb2.ForgetRequest, context: Context
    ) -> kv_pb2.ForgetResponse:
        """Deletes KV from the pool."""
        return await self._instance.forgetting.forget(request)

    async def PrefillStats(  # noqa: N802
        self, request: prefill_pb2.PrefillStatsRequest, context: Context
    ) -> prefill_pb2.PrefillStatsResponse:
        """Everything the instance holds."""
        return prefill_pb2.PrefillStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())
