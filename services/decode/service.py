"""A decode instance as a process."""

from moonpool.engine.instance import InstanceContext, run_instance
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import Service
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.config import DecodeConfig
from services.decode.instance import DecodeInstance
from services.decode.servicer import DecodeServicer


def contract(instance: DecodeInstance) -> Service:
    """The DecodeService of one instance."""
    return decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], DecodeServicer(instance, instance.gauges())


async def serve(context: ProcessContext, config: DecodeConfig) -> None:
    """Runs a decode instance until it is told to stop; raises as `run_instance`."""

    def build(shared: InstanceContext) -> tuple[DecodeInstance, Service]:
        instance = DecodeInstance(shared, config)
        return instance, contract(instance)

    await run_instance(context, config, kv_pb2.INSTANCE_KIND_DECODE, build)
