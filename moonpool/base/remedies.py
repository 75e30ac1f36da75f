"""Where docs/errors.md says what to do about an error: each row of the page has an anchor."""

# Tests compare the page with these tables.

import re
from collections.abc import Mapping

PAGE = "docs/errors.md"
WORDS: Mapping[str, str] = {
    "which is not installed": "not-installed",
    "no C++ compiler found": "no-compiler",
    "others may write there, and what lies there is run": "kernels-folder",
    "gives wrong results on this device": "wrong-kernel",
    "no network: ": "no-network",
    "the disk is full": "disk-full",
    "is not the file that it should be": "wrong-file",
    "cannot be reached, or refuses": "proxy",
    "another program listens at": "port-taken",
    "another stack uses it": "data-dir-taken",
    "nothing reads this environment variable": "unknown-variable",
    "weights are mapped from a file, and steps wait for the disk": "mapped-weights",
    "did not go on for": "silent-start",
    "ended with status": "ended",
    "times in a row, last with status": "ended-again",
    "no stack is running": "no-stack",
    "several stacks run; name one with --address": "several-stacks",
    "the conductor does not answer": "no-conductor",
    "prompt and answer together may have": "too-long",
    "no API key was given": "no-key",
    "this API key is not known": "unknown-key",
    "is not served without API keys": "unknown-host",
    "shows a certificate that is not accepted": "their-certificate",
    "connections without a certificate": "own-certificate",
    "is it of another authority?": "own-certificate",
    "speaks TLS and this side does not": "one-end-tls",
    "speaks plaintext and this side TLS": "one-end-tls",
    "the connection shows no certificate": "certificate-wanted",
    "instance has joined": "no-instance",
    "the request waited for": "waited",
    "the client waited for the conductor": "conductor-late",
    "the conductor refuses this instance": "instance-refused",
    "versions are at most one minor apart": "skew",
    "no more records are written to a data folder": "store-disk",
}
"""The anchor of each row that is found by words of a message."""
CODES = frozenset({
    *("invalid_value", "unsupported", "batch_over"),
    *("invalid_api_key", "permission_denied", "host_not_allowed"),
    *("not_found", "model_not_found", "unknown_url", "previous_response_not_found", "conversation_not_found"),
    *("request_too_large", "file_too_large", "head_too_large", "upload_timeout", "unsupported_media_type"),
    *("ttft_slo", "tbt_slo", "no_decode_room", "queue_full"),
    *("request_budget", "token_budget", "concurrent_budget", "rate_limit_exceeded"),
    *("too_many_batches", "too_many_background_responses", "max_loras", "contexts_full", "records_full"),
    *("unavailable", "timeout", "internal"),
})  # fmt: skip
"""What `code` of an error over HTTP may be; each is its row's anchor."""
_ANY = re.compile("|".join(map(re.escape, WORDS)))


def remedy(message: str, code: str = "") -> str:
    """Where the page tells of the first known words of a message, else of a code; "" = the page knows neither."""
    if (found := _ANY.search(message)) is not None:
        return f"{PAGE}#{WORDS[found.group()]}"
    return f"{PAGE}#{code}" if code in CODES else ""
