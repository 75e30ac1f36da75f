"""Spans to an OpenTelemetry collector, over OTLP/HTTP: the extra `otel`."""

from __future__ import annotations

from typing import Any

from moonpool.base import world
from moonpool.base.errors import ConfigError
from moonpool.base.telemetry.spans import EndedSpan
from moonpool.base.telemetry.trace_context import ids_of
from moonpool.base.version import installed_version

SETTING = "otlp_traces_endpoint"
SEND_EVERY_MS = 1000
SEND_S = 3.0
"""Seconds that a batch may take to reach the collector."""


class OtlpExporter:
    """Sends spans in batches from a thread of its own. Spans are dropped while the collector is away.

    OpenTelemetry's own variables count too, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """Send to `endpoint`, such as "http://collector:4318/v1/traces", what `instance` of a service tells.

        Raises:
            ConfigError: the extra is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(SETTING, f"needs `pip install moonpool[otel]`: {error.name} is missing") from error
        own = {"service.name": f"moonpool-{service}", "service.instance.id": instance}
        self._resource = Resource.create(own | {"service.version": installed_version()})
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._processor: Any = BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_MS)

    def export(self, span: EndedSpan) -> None:
        """Take a span; returns at once. Its time, monotonic, becomes wall-clock time here."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

        def context(traceparent: str, *, remote: bool) -> SpanContext:
            return SpanContext(*ids_of(traceparent), is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        to_wall_ns = int(world.unix_time() * 1e9) - world.monotonic_ns()
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=context(span.traceparent, remote=False),
                parent=context(span.parent, remote=True) if span.parent else None,
                resource=self._resource,
                attributes={name: value for name, value in span.attributes.items() if value is not None},
                kind=SpanKind.SERVER if span.serves else SpanKind.INTERNAL,
                start_time=span.start_ns + to_wall_ns,
                end_time=span.end_ns + to_wall_ns,
            )
        )

    def close(self) -> None:
        """Send what waits, within `SEND_S`; the thread ends."""
        self._processor.force_flush(int(1e3 * SEND_S))
        self._processor.shutdown()
