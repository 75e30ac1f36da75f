"""Recorded coding agents in Weka's form, turned into Mooncake's agentic form.

A file from Weka's kv-cache-tester is one JSON object a session: `block_size`, and `requests` in time order. A request
(`type` "n" or "s") has `in` and `out` (tokens), `hash_ids`, `t` and `api_time` (seconds), at times `think_time`. An
entry with `type` "subagent" has separate `requests`: the first waits for the parent's request before, the parent's next
waits for the last. `python -P -m moonpool.simulator.traces.weka FILE ... --out TRACE`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from moonpool.base.json_parts import parse_json
from moonpool.simulator.traces.mooncake import ChainIds, TraceError, TraceRequest, trace_line


class WekaSessions:
    """Sessions from several files as one trace. Files share no blocks, since ids are a file's own.

    Attributes:
        block_size: tokens in a block, in all files; 0 = no file was read.
    """

    def __init__(self) -> None:
        self.block_size = 0
        self._ids = count()

    def read(self, path: Path, at_ms: float) -> list[TraceRequest]:
        """Return a file's requests; the first comes at `at_ms`.

        Raises:
            TraceError: the file cannot be read or is no session; names file and field.
        """
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
            block_size = int(data["block_size"])
            if block_size < 1 or self.block_size not in (0, block_size):
                raise TraceError(f"{path}: block_size is {block_size}, other files have {self.block_size}")
            self.block_size = block_size
            session = _Session(str(data.get("id") or path.stem), block_size, self._ids)
            return list(session.requests(data["requests"], session.name, (), at_ms))
        except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
            raise TraceError(f"{path}: no session of an agent ({type(error).__name__}: {error})") from error


class _Session:
    """One file's session."""

    def __init__(self, name: str, block_size: int, ids: "count[int]") -> None:
        self.name = name
        self._ids = ChainIds(block_size, ids)

    def requests(
        self, entries: Sequence[Mapping[str, Any]], name: str, begin: tuple[str, ...], at_ms: float
    ) -> Iterator[TraceRequest]:
        """The requests from an agent called `name`, which begins after the requests in `begin` have ended."""
        last, wait_for, ended_s, turn = begin, begin, None, 0
        for place, entry in enumerate(entries):
            if entry["type"] == "subagent":
                inner = list(self.requests(entry["requests"], f"{name}/{place}", last, at_ms))
                yield from inner
                wait_for = (*wait_for, inner[-1].name) if inner and last else wait_for
                continue
            delay = self._delay_ms(entry, ended_s)
            at_ms += delay
            tokens = max(1, int(entry["in"]))
            request = TraceRequest(
                at_ms, tokens, max(1, int(entry["out"])), self._ids.chain(entry.get("hash_ids") or (), tokens),
                session=name, name=f"{name}#{turn}", wait_for=wait_for, delay=delay if wait_for else 0.0,
            )  # fmt: skip
            yield request
            last = wait_for = (request.name,)
            ended_s, turn = float(entry["t"]) + float(entry.get("api_time") or 0.0), turn + 1

    @staticmethod
    def _delay_ms(entry: Mapping[str, Any], ended_s: float | None) -> float:
        """What a tool or a person took before a request; 0 before the first."""
        if ended_s is None:
            return 0.0
        thought = entry.get("think_time")
        return 1000 * max(0.0, float(entry["t"]) - ended_s if thought is None else float(thought))


def main() -> None:
    """Write one trace from several files' sessions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--every-s", type=float, default=50.0, help="seconds from one session's begin to the next")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sessions = WekaSessions()
    requests = [
        request
        for place, path in enumerate(options.files)
        for request in sessions.read(path, 1e3 * options.every_s * place)
    ]
    requests.sort(key=lambda request: request.timestamp)
    with options.out.open("w", encoding="utf-8") as out:
        out.write(json.dumps({"block_size": sessions.block_size}) + "\n")
        out.writelines(map(trace_line, requests))


if __name__ == "__main__":
    main()
