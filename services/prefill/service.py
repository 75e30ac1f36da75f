"""A prefill instance as a process: work and contract, run by what all engine instances share."""

from moonpool.engine.instance import Parts, run_instance
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import Service
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.config import PrefillConfig
from services.prefill.servicer import PrefillServicer
from services.prefill.work import Work


def contract(work: Work) -> Service:
    """The PrefillService over one instance's work."""
    return prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], PrefillServicer(work, work.gauges())


async def serve(context: ProcessContext, config: PrefillConfig) -> None:
    """Runs a prefill instance until it is told to stop; raises as `run_instance`."""

    def build(parts: Parts) -> tuple[Work, Service]:
        work = Work(parts, config)
        return work, contract(work)

    await run_instance(context, config, kv_pb2.INSTANCE_KIND_PREFILL, build, stages=config.stages)
