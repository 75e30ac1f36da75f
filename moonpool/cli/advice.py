"""What a person can do about an error."""

from moonpool.client.transport import NotConnected
from moonpool.errors import DeadlineExceeded, MoonpoolError, Overloaded, Unavailable, UnsupportedModel


def advice(error: MoonpoolError) -> str:
    """A sentence that says what to do next; "" where the error says it all."""
    if isinstance(error, NotConnected):
        return "`moonpool up` starts a stack on this machine; --address HOST:PORT names one that runs elsewhere."
    if isinstance(error, Overloaded):
        return f"Try again in {max(1.0, error.retry_after_s):.0f} s; `moonpool state` shows how busy it is."
    if isinstance(error, Unavailable | DeadlineExceeded):
        return "`moonpool state` shows which instances there are and how busy they are."
    if isinstance(error, UnsupportedModel):
        return "docs/models.md says which models are supported; --model smollm2 fetches one that is."
    return ""
