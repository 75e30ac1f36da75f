"""A decode instance as a process: work and contract, run by what all engine instances share."""

from moonpool.engine.instance import Parts, run_instance
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import Service
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.config import DecodeConfig
from services.decode.servicer import DecodeServicer
from services.decode.work import Work


def contract(work: Work) -> Service:
    """The DecodeService over one instance's work."""
    return decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], DecodeServicer(work, work.gauges())


async def serve(context: ProcessContext, config: DecodeConfig) -> None:
    """Runs a decode instance until it is told to stop; raises as `run_instance`."""

    def build(parts: Parts) -> tuple[Work, Service]:
        work = Work(parts, config)
        return work, contract(work)

    await run_instance(context, config, kv_pb2.INSTANCE_KIND_DECODE, build)
