"""A stream that is resumed: checks what the client says it has, and makes what the client needs to resume again."""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.unknown_fields import UnknownFieldSet

from moonpool.errors import InvalidRequest
from moonpool.v1 import conductor_pb2
from services.conductor.core.messages import ATTEMPT_MARK, Resumed, Target
from services.conductor.request import Request, Served
from services.conductor.translate import target_proto

SECRET_BYTES = 16
"""Of the secrets that are drawn here."""
SECRET_LENGTHS = range(16, 65)
MAX_ID_CHARS = 256
_ATTEMPT = re.compile(r"(?:(\d{1,10})\.)?\d{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Had:
    """What a client has of one answer: its tokens, and so many characters of its text."""

    tokens: array[int]
    text_chars: int


@dataclass(frozen=True, slots=True)
class Resume:
    """What a client has of its answers, and where that came from.

    Attributes:
        answers: each of them.
        point: what the client was told last. It proves that it is the same client.
        resumed: the same for the core.
        unscored: the prompt's log probabilities are wanted, and it has not got them.
    """

    answers: tuple[Had, ...]
    point: conductor_pb2.ResumePoint
    resumed: Resumed
    unscored: bool = False


def secret_for(resume: Resume | None) -> bytes:
    """The client's own; for a new request one that nobody can guess."""
    return secrets.token_bytes(SECRET_BYTES) if resume is None else resume.point.secret


def read_resume(message: conductor_pb2.GenerateRequest, request: Request, served: Served) -> Resume | None:
    """What is to be resumed; None for a new request.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    if not message.HasField("resume"):
        _require("from_position", message.from_position == 0, "must be 0 unless a stream is resumed")
        return None
    resume, point = message.resume, message.resume.point
    for field, part in (("resume", resume), ("resume.point", point)):
        unknown = UnknownFieldSet(part)
        if len(unknown):
            raise InvalidRequest(field, f"has field number {unknown[0].field_number}, which is not known here")
    _require("request_id", message.request_id != "", "a stream is resumed by its request's id")
    seeded = message.sampling.HasField("seed") or request.has_beams
    _require("sampling.seed", seeded, "must be the seed that was told when it was placed")
    _require("resume.count", resume.count >= 1, "must be at least 1")
    count, further = len(resume.token_ids), request.choices - 1
    _require("from_position", message.from_position == count, f"must be {count}, as resume.token_ids has so many")
    _require("resume.further", len(resume.further) == further, f"must have {further}: one for each further answer")
    parts = [("resume.token_ids", resume.token_ids, resume.text_chars)]
    parts += [("resume.further.token_ids", it.token_ids, it.text_chars) for it in resume.further]
    answers = tuple([_read_had(*part, request, served.config.vocab_size) for part in parts])
    least, most = SECRET_LENGTHS[0], SECRET_LENGTHS[-1]
    _require("resume.point.secret", len(point.secret) in SECRET_LENGTHS, f"must have {least} to {most} bytes")
    _check_sequence(point.sequence, request.id, resume.count)
    unscored = _lacks_scores(resume.prompt_scored, request, answers)
    alone = request.choices == 1 and not request.has_beams
    target = None if unscored else target_of(point)  # no decode instance has the prompt's log probabilities
    resumed = Resumed(count if alone else 0, resume.count, point.sequence, target)
    return Resume(answers, point, resumed, unscored)


def resume_point(
    secret: bytes, placement: conductor_pb2.Placement, sequence: str, target: Target | None
) -> conductor_pb2.ResumePoint:
    """What a client is told when its request is placed."""
    point = conductor_pb2.ResumePoint(placement=placement, sequence=sequence, secret=secret)
    if target is not None:
        point.target.CopyFrom(target_proto(target))
    return point


def target_of(point: conductor_pb2.ResumePoint) -> Target | None:
    """Decode's promise, None without one; where the instance is, only its own word counts."""
    if not point.HasField("target"):
        return None
    target, decode = point.target, point.target.decode
    _require("resume.point.target.decode.id", 1 <= len(decode.id) <= MAX_ID_CHARS, f"1 to {MAX_ID_CHARS} characters")
    return Target(decode.id, decode.incarnation, "", target.transfer_id, target.generation, 0)


def _read_had(field: str, token_ids: Sequence[int], text_chars: int, request: Request, vocabulary: int) -> Had:
    _require(field, len(token_ids) <= request.max_tokens, f"the answer has at most {request.max_tokens} tokens")
    known = not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary)
    _require(field, known, f"token ids must be in [0, {vocabulary})")
    return Had(array("i", token_ids), text_chars)


def _lacks_scores(scored: bool, request: Request, answers: Sequence[Had]) -> bool:
    """Whether the client is still to be told the prompt's log probabilities, which come before the first token."""
    wanted, begun = request.sampling.prompt_logprobs is not None, any(it.tokens for it in answers)
    field = "resume.prompt_scored"
    _require(field, wanted or not scored, "only where sampling.prompt_logprobs wants a prompt's log probabilities")
    _require(field, scored or not (wanted and begun), "must be set: who has tokens was told them before")
    return wanted and not scored


def _check_sequence(sequence: str, request_id: str, count: int) -> None:
    """Only an earlier attempt of this request is meant: the names of those to come must be free."""
    name, mark, attempt = sequence.partition(ATTEMPT_MARK)
    match = _ATTEMPT.fullmatch(attempt)
    earlier = not mark or (match is not None and int(match[1] or 0) < count)
    _require("resume.point.sequence", name == request_id and earlier, "is not an earlier placement of this request")


def _require(field: str, condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(field, message)
