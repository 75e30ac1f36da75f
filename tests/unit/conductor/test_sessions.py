"""What clients say of sessions and of prompts that will come, at the conductor's interface."""

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.sessions import MAX_SESSION_S, SessionTurn
from moonpool.v1 import conductor_pb2

from .fakes import decode, prefill
from .stack import stack

PROMPT = list(range(30, 90))


async def test_a_session_is_known_by_its_tenant_until_its_last_turn() -> None:
    sampling = SamplingParams(max_tokens=1)
    async with stack(prefill(), decode()) as s:
        assert not await s.client.update_session(SessionTurn(id="s"), tenant="ann")
        await s.client.generate(token_ids=PROMPT, sampling=sampling, session=SessionTurn(id="s"), tenant="ann")
        assert await s.client.update_session(SessionTurn(id="s", return_s=5.0), tenant="ann")
        assert not await s.client.update_session(SessionTurn(id="s"), tenant="bob")
        assert await s.client.update_session(SessionTurn(id="s", last=True), tenant="ann")
        assert not await s.client.update_session(SessionTurn(id="s"), tenant="ann")
        await s.rest()


async def test_a_session_has_a_name() -> None:
    async with stack() as s:
        with pytest.raises(InvalidRequest) as caught:
            await s.servicer.UpdateSession(conductor_pb2.UpdateSessionRequest(), None)
        assert caught.value.field == "session.id"


async def test_prompts_with_blocks_are_announced() -> None:
    """A prompt shorter than a block has no KV that could be brought anywhere."""
    async with stack(prefill(), decode()) as s:
        assert await s.client.announce([{"token_ids": PROMPT}, {"token_ids": PROMPT[:2]}], 60.0) == 1
        assert await s.client.announce([{"token_ids": PROMPT}], None) == 1
        with pytest.raises(InvalidRequest) as caught:
            await s.client.announce([{"token_ids": [-1]}], 60.0)
        assert "token_ids" in caught.value.field
        await s.rest()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (conductor_pb2.AnnouncePromptsRequest(within_s=-1.0), "within_s"),
        (conductor_pb2.AnnouncePromptsRequest(within_s=float("nan")), "within_s"),
        (conductor_pb2.AnnouncePromptsRequest(within_s=2 * MAX_SESSION_S), "within_s"),
        (conductor_pb2.AnnouncePromptsRequest(requests=[conductor_pb2.GenerateRequest()] * 1025), "requests"),
    ],
)
async def test_announcements_out_of_bounds(asked: conductor_pb2.AnnouncePromptsRequest, field: str) -> None:
    async with stack() as s:
        with pytest.raises(InvalidRequest) as caught:
            await s.servicer.AnnouncePrompts(asked, None)
        assert caught.value.field == field
