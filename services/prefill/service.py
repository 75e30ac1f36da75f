"""A prefill instance as a process."""

from moonpool.engine.instance import InstanceContext, run_instance
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import Service
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.config import PrefillConfig
from services.prefill.instance import PrefillInstance
from services.prefill.servicer import PrefillServicer


def contract(instance: PrefillInstance) -> Service:
    """The PrefillService of one instance."""
    return prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], PrefillServicer(instance, instance.gauges())


async def serve(context: ProcessContext, config: PrefillConfig) -> None:
    """Runs a prefill instance until it is told to stop; raises as `run_instance`."""

    def build(shared: InstanceContext) -> tuple[PrefillInstance, Service]:
        instance = PrefillInstance(shared, config)
        return instance, contract(instance)

    await run_instance(
        context,
        config,
        kv_pb2.INSTANCE_KIND_PREFILL,
        build,
        stages=config.stages,
        step_tokens=config.step_tokens,
    )
