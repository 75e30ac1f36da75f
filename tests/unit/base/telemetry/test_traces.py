"""Spans of traces: whose parents they are, which are wanted, and how a request's parts come together."""

import sys

import pytest

from moonpool.base import world
from moonpool.base.errors import ConfigError
from moonpool.base.telemetry.otlp import OtlpExporter
from moonpool.base.telemetry.spans import EndedSpan, Recorder
from moonpool.base.telemetry.trace_context import child_of, ids_of, is_sampled, is_traceparent

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Kept:
    """An exporter that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[EndedSpan] = []
        self.closed = False

    def export(self, span: EndedSpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        self.closed = True


def test_a_request_s_spans_are_one_tree() -> None:
    kept = Kept()
    recorder = Recorder("prefill-0", None, kept)
    with recorder.span("generate", CLIENT, request="r") as outer, recorder.span("prefill", outer.traceparent) as inner:
        assert recorder.traceparent_of("r") == outer.traceparent
    prefill, generate = kept.spans
    assert (generate.parent, prefill.parent) == (CLIENT, outer.traceparent)
    assert (generate.traceparent, prefill.traceparent) == (outer.traceparent, inner.traceparent)
    assert {ids_of(value)[0] for value in (CLIENT, outer.traceparent, inner.traceparent)} == {ids_of(CLIENT)[0]}
    assert len({ids_of(value)[1] for value in (CLIENT, outer.traceparent, inner.traceparent)}) == 3
    assert generate.start_ns <= prefill.start_ns <= prefill.end_ns <= generate.end_ns
    assert recorder.traceparent_of("r") == "", "it has ended"
    recorder.close()
    assert kept.closed


def test_layers_are_one_part_of_their_request() -> None:
    kept = Kept()
    recorder = Recorder("prefill-0", None, kept)
    with recorder.span("prefill", CLIENT, request="r") as span:
        for layer in range(3):
            recorder.add("kv.send", 100 + layer, 200 + layer, request="r", layer=layer, bytes=10)
        recorder.add("kv.send", 0, 1, request="another", bytes=1)
        recorder.add("engine.layer", 0, 1, layer=1)
    assert [part.name for part in kept.spans] == ["prefill", "kv.send"]
    part = kept.spans[1]
    assert (part.parent, part.start_ns, part.end_ns) == (span.traceparent, 100, 202)
    assert (part.attributes["bytes"], part.attributes["parts"]) == (30, 3)


@pytest.mark.parametrize(
    ("parent", "starts", "told"),
    [("", False, 0), ("", True, 1), (CLIENT, False, 1), (CLIENT[:-2] + "00", True, 0), ("no such form", False, 0)],
)
def test_which_spans_are_wanted(parent: str, starts: bool, told: int) -> None:
    kept = Kept()
    with Recorder("x", None, kept).span("s", parent, starts=starts) as span:
        assert bool(span.traceparent) == bool(told)
    assert len(kept.spans) == told
    with Recorder("x", None).span("s", parent, starts=starts) as span:
        assert not span.traceparent, "nobody collects"


def test_a_trace_that_begins_here() -> None:
    begun = child_of("")
    assert is_traceparent(begun)
    assert is_sampled(begun)
    assert ids_of(child_of(begun))[0] == ids_of(begun)[0]


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: needs `pip install moonpool\[otel\]`"):
        OtlpExporter("http://127.0.0.1:9/v1/traces", "gateway", "gateway-0")


def test_times_are_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="the extra `otel` is not installed")
    told = []
    monkeypatch.setattr(export.BatchSpanProcessor, "on_end", lambda self, span: told.append(span))
    exporter = OtlpExporter("http://127.0.0.1:9/v1/traces", "gateway", "gateway-0")
    now = world.monotonic_ns()
    exporter.export(EndedSpan("s", child_of(CLIENT), CLIENT, now - 10**9, now, {"n": 1, "none": None}, serves=True))
    exporter.close()
    [span] = told
    assert abs(span.end_time / 1e9 - world.unix_time()) < 60.0
    assert span.end_time - span.start_time == 10**9
    assert span.parent.span_id == ids_of(CLIENT)[1]
    assert (dict(span.attributes), span.resource.attributes["service.name"]) == ({"n": 1}, "moonpool-gateway")
