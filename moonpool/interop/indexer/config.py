"""Flags of an indexer."""

from typing import ClassVar

from pydantic import Field, field_validator

from moonpool.base.config import ListenAddress, OptionalAddress, ServiceConfig


class IndexerConfig(ServiceConfig):
    """Tells routers of other makes which engine holds which KV: over HTTP, and as KV events over ZMQ."""

    flag_groups: ClassVar = {"cluster": ("conductor",), "events": ("events", "replay_events"), "http": ("api_key",)}
    listen: ListenAddress = Field("127.0.0.1:13333", description="HOST:PORT of the HTTP interface")
    conductor: OptionalAddress = Field(
        "", description="HOST:PORT of the conductor whose instances are indexed; default: registered publishers alone"
    )
    events: str = Field(
        "",
        description="endpoint at which KV events of the first instance are published, tcp://*:PORT or ipc://PATH; each "
        "further instance has the next port, or .1, .2 and so on behind the path; default: none are published",
    )
    replay_events: str = Field("", description="likewise the endpoint at which missed events are asked for")
    api_key: str = Field("", description="key that HTTP clients must show (Authorization: Bearer KEY); default: none")
    max_blocks: int = Field(
        1_000_000, ge=1, description="blocks whose tokens are remembered; some 400 bytes of memory each"
    )
    max_publishers: int = Field(1024, ge=1, description="publishers of KV events that may be registered at once")

    @field_validator("events", "replay_events")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not value.startswith(("tcp://", "ipc://")):
            raise ValueError(f"must be tcp://HOST:PORT or ipc://PATH, got {value!r}")
        return value
