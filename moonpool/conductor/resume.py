"""Resumed requests: how far the client is, and the point from which a client can resume."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from google.protobuf.unknown_fields import UnknownFieldSet

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.conductor.core.request_spec import ATTEMPT_MARK, DecodeReservation, ResumeState
from moonpool.conductor.proto_conversion import reservation_proto
from moonpool.conductor.valid_request import ClientProgress, ResumeRequest, require
from moonpool.v1 import conductor_pb2

SECRET_LENGTHS = range(16, 65)
"""Bytes in the secret that a client shows to resume the request."""
MAX_SEQUENCE_CHARS = 256
_ATTEMPT = re.compile(r"(?:(\d{1,10})\.)?\d{1,10}", re.ASCII)


def read_resume(
    message: conductor_pb2.GenerateRequest, sampling: SamplingParams, vocabulary: int
) -> ResumeRequest | None:
    """Return how far the client of a resumed request is; None for a new request.

    `sampling` is the request's, already checked; `vocabulary` the number of token ids.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    if not message.HasField("resume"):
        require("from_position", message.from_position == 0, "must be 0 unless a stream is resumed")
        return None
    resume, point = message.resume, message.resume.point
    for name, part in (("resume", resume), ("resume.point", point)):
        unknown = UnknownFieldSet(part)
        if len(unknown):
            raise InvalidRequest(name, f"has field number {unknown[0].field_number}, which is not known here")
    require("request_id", message.request_id != "", "a stream is resumed by its request's id")
    seeded = message.sampling.HasField("seed") or sampling.deferred
    require("sampling.seed", seeded, "must be the seed that the `placed` event has")
    require("resume.count", resume.count >= 1, "must be at least 1")
    count, further = len(resume.token_ids), sampling.n - 1
    require("from_position", message.from_position == count, f"must be {count}, as resume.token_ids has so many")
    require("resume.further", len(resume.further) == further, f"must have {further}: one for each further answer")
    parts = [("resume.token_ids", resume.token_ids, resume.text_chars)]
    parts += [("resume.further.token_ids", answer.token_ids, answer.text_chars) for answer in resume.further]
    choices = tuple([_read_progress(*part, sampling.max_tokens, vocabulary) for part in parts])
    least, most = SECRET_LENGTHS[0], SECRET_LENGTHS[-1]
    require("resume.point.secret", len(point.secret) in SECRET_LENGTHS, f"must have {least} to {most} bytes")
    _check_sequence(point.sequence, message.request_id, resume.count)
    unscored = _lacks_scores(resume.prompt_scored, sampling, choices)
    alone = sampling.n == 1 and not sampling.deferred
    target = None if unscored else target_of(point)  # no decode instance has them
    state = ResumeState(count if alone else 0, resume.count, point.sequence, target)
    return ResumeRequest(choices, point, state, unscored)


def resume_point(
    secret: bytes, placement: conductor_pb2.Placement, sequence: str, target: DecodeReservation | None
) -> conductor_pb2.ResumePoint:
    """Return the point from which a client can resume the request, sent on placement."""
    point = conductor_pb2.ResumePoint(placement=placement, sequence=sequence, secret=secret)
    if target is not None:
        point.target.CopyFrom(reservation_proto(target))
    return point


def target_of(point: conductor_pb2.ResumePoint) -> DecodeReservation | None:
    """The reservation at decode, None without one. The client's word on the instance's address does not count."""
    if not point.HasField("target"):
        return None
    target, decode = point.target, point.target.decode
    require(
        "resume.point.target.decode.id",
        1 <= len(decode.id) <= MAX_SEQUENCE_CHARS,
        f"1 to {MAX_SEQUENCE_CHARS} characters",
    )
    return DecodeReservation(decode.id, decode.epoch, "", target.transfer_id, target.generation, 0)


def _read_progress(
    field: str, token_ids: Sequence[int], text_chars: int, max_tokens: int, vocabulary: int
) -> ClientProgress:
    require(field, len(token_ids) <= max_tokens, f"the answer has at most {max_tokens} tokens")
    known = not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary)
    require(field, known, f"token ids must be in [0, {vocabulary})")
    return ClientProgress(array("i", token_ids), text_chars)


def _lacks_scores(scored: bool, sampling: SamplingParams, choices: Sequence[ClientProgress]) -> bool:
    """Whether the client lacks the prompt's log probabilities or embedding, which are sent before the first token."""
    wanted, begun = sampling.scores_prompt, any(choice.tokens for choice in choices)
    field = "resume.prompt_scored"
    require(field, wanted or not scored, "only where sampling wants a prompt's log probabilities or embedding")
    require(
        field,
        scored or not (wanted and begun),
        "must be set: a client that has tokens has got them before",
    )
    return wanted and not scored


def _check_sequence(sequence: str, request_id: str, count: int) -> None:
    """Check that a sequence is an earlier attempt at this request: the ids of later attempts must stay free."""
    name, mark, attempt = sequence.partition(ATTEMPT_MARK)
    match = _ATTEMPT.fullmatch(attempt)
    earlier = not mark or (match is not None and int(match[1] or 0) < count)
    require("resume.point.sequence", name == request_id and earlier, "is not an earlier placement of this request")
