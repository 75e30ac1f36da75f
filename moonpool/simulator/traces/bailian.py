"""Alibaba's published traces of Bailian (qwen-bailian-usagetraces-anon), turned into Mooncake's form.

A line has `chat_id`, `parent_chat_id` (-1 = a conversation begins), `timestamp` (seconds), `input_length` and
`output_length` (tokens), and `hash_ids`: a hash of each block's own 16 tokens, the same after different prefixes.
Requests come at their recorded times, and turns of one conversation have one `session_id`: when an answer had come is
not recorded, so no turn waits for one. `python -P -m moonpool.simulator.traces.bailian FILE --out TRACE`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moonpool.base.json_parts import parse_json
from moonpool.simulator.traces.mooncake import ChainIds, TraceError, TraceRequest, trace_line

BLOCK_SIZE = 16


def read_bailian(path: Path) -> Iterator[TraceRequest]:
    """A file's requests, in file order.

    Raises:
        TraceError: the file cannot be read, or a line is no request; names file and line.
    """
    reader, place = _Reader(), str(path)
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}"
                yield reader.request(parse_json(line))
    except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{place}: no request ({type(error).__name__}: {error})") from error


class _Reader:
    """Knows the conversations and blocks in the lines so far."""

    def __init__(self) -> None:
        self._ids = ChainIds(BLOCK_SIZE)
        self._sessions: dict[int, str] = {}  # by chat

    def request(self, data: Mapping[str, Any]) -> TraceRequest:
        chat, parent = int(data["chat_id"]), int(data.get("parent_chat_id", -1))
        # A trace may begin within a conversation.
        session = self._sessions[chat] = self._sessions.get(parent) or str(chat)
        tokens, answer = max(1, int(data["input_length"])), max(1, int(data["output_length"]))
        chain = self._ids.chain(data["hash_ids"], tokens)
        return TraceRequest(1e3 * float(data["timestamp"]), tokens, answer, chain, session=session)


def main() -> None:
    """Write the trace in Mooncake's form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    requests = sorted(read_bailian(options.file), key=lambda request: request.timestamp)
    with options.out.open("w", encoding="utf-8") as out:
        out.write(json.dumps({"block_size": BLOCK_SIZE}) + "\n")
        out.writelines(map(trace_line, requests))


if __name__ == "__main__":
    main()
