"""The fork servers of a local stack: what each imports, and how long they are there."""

import contextlib
import sys
from collections.abc import Iterator

from moonpool.base.fork_server import IN_USE, ForkServer

SERVICE_MODULES = (
    "moonpool.conductor.service",
    "moonpool.kvstore.service",
    "moonpool.gateway.service",
    "moonpool.engine.prefill.service",
    "moonpool.engine.decode.service",
)
"""What a fork server imports for services."""
ENGINE_MODULES = (
    "moonpool.engine.kernels.native.library",
    "moonpool.base.checkpoint",
    "moonpool.engine.cpu_sharing",
    "moonpool.engine.cuda_graphs",
    "moonpool.engine.footprint",
    "moonpool.engine.model_runner",
    "moonpool.engine.pipeline",
    "moonpool.engine.structured_output",
    "moonpool.engine.warm_up",
    "moonpool.engine.models.loader",
    "moonpool.engine.platforms.stage_platform",
)
"""What a fork server imports for engines besides."""


@contextlib.contextmanager
def forked_services() -> Iterator[None]:
    """Within, this process starts services and engines by forking (`moonpool.base.fork_server`), if the system can."""
    if sys.platform != "linux" or IN_USE.services is not None:
        yield
        return
    IN_USE.services = ForkServer(SERVICE_MODULES)
    IN_USE.engines = ForkServer(ENGINE_MODULES, IN_USE.services)
    try:
        yield
    finally:
        IN_USE.close()
