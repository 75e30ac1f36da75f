"""What decode instances that are made up tell, and log probabilities: a token's is minus its id, in tenths."""

from collections.abc import Sequence

from moonpool.v1 import decode_pb2, kv_pb2


def made_up(token_ids: Sequence[int]) -> kv_pb2.Logprobs:
    """Of some tokens, without likely ones."""
    return kv_pb2.Logprobs(logprobs=[-token / 10 for token in token_ids], ranks=[1] * len(token_ids))


def scores(sampling: kv_pb2.Sampling, token_ids: Sequence[int]) -> kv_pb2.Logprobs | None:
    """Of an answer's tokens, where they are wanted."""
    return made_up(token_ids) if sampling.HasField("logprobs") else None


def prompt_scores(sampling: kv_pb2.Sampling, prompt: Sequence[int]) -> kv_pb2.Logprobs | None:
    """Of a prompt's tokens but the first, where they are wanted."""
    return made_up(prompt[1:]) if sampling.HasField("prompt_logprobs") else None


def told(
    spec: kv_pb2.SequenceSpec,
    choice: int,
    position: int,
    token_ids: Sequence[int],
    reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED,
) -> decode_pb2.StepsResponse:
    """Tokens of an answer from a position on."""
    tokens = decode_pb2.SequenceTokens(
        request_id=spec.request_id,
        position=position,
        token_ids=token_ids,
        finish_reason=reason,
        choice=choice,
        logprobs=scores(spec.sampling, token_ids),
    )
    return decode_pb2.StepsResponse(tokens=[tokens])
