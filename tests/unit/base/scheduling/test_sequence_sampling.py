from array import array

from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.v1 import kv_pb2
from tests.unit.base.scheduling.helpers import tokens

STOP, LENGTH, GOES_ON = kv_pb2.FINISH_REASON_STOP, kv_pb2.FINISH_REASON_LENGTH, kv_pb2.FINISH_REASON_UNSPECIFIED


def test_stop_tokens_end_a_sequence_like_the_models_end_tokens() -> None:
    sampling = SequenceSampling.of(SamplingParams(max_tokens=3, stop_token_ids=[9], seed=5), 4, [2, 9])
    assert sampling.end_token_ids == {2, 9}
    assert sampling.at(tokens(4)).seed == 5


def test_ignored_eos_still_leaves_stop_tokens() -> None:
    sampling = SequenceSampling.of(SamplingParams(stop_token_ids=[9], ignore_eos=True), 4, [2])
    assert sampling.end_token_ids == {9}
    assert sampling.banned_token_ids == (2, 9)


def test_positions_count_from_the_original_prompt() -> None:
    sampling = SequenceSampling(4, SamplingParams(min_tokens=2), banned_token_ids=(2,))
    assert sampling.at(tokens(4)).position == 0
    assert sampling.at(tokens(5)).banned == (2,)
    spec = sampling.at(tokens(6))  # a continued stream: two tokens were generated elsewhere
    assert (spec.position, spec.banned, spec.prompt_tokens, spec.history) == (2, (), 4, None)


def test_history_travels_only_when_penalties_look_at_it() -> None:
    assert SequenceSampling(1).at(tokens(2)).history is None
    for changed in ({"presence_penalty": 1.0}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}):
        history = SequenceSampling(1, SamplingParams(**changed)).at(array("i", [1, -1])).history  # type: ignore[arg-type]
        assert history == b"\x01\0\0\0\xff\xff\xff\xff"


def test_finish() -> None:
    sampling = SequenceSampling(2, SamplingParams(max_tokens=2), end_token_ids=frozenset({7}))
    assert sampling.finish(array("i", [7, 7]), 100) == GOES_ON  # end tokens of the prompt are no ends
    assert sampling.finish(array("i", [1, 1, 7]), 100) == STOP
    assert sampling.finish(array("i", [1, 1, 1]), 100) == GOES_ON
    assert sampling.finish(array("i", [1, 1, 1, 1]), 100) == LENGTH
    assert sampling.finish(array("i", [1, 1, 1, 7]), 100) == STOP
    assert sampling.finish(array("i", [1, 1, 1]), 3) == LENGTH
    assert (sampling.total_tokens(100), sampling.total_tokens(3)) == (4, 3)


def test_the_end_of_a_bad_word_is_banned_behind_its_beginning() -> None:
    sampling = SequenceSampling.of(SamplingParams(), 2, [9], [(5,), (6, 7), (7, 7, 8)])
    at = {1: (5,), 6: (5, 7), 7: (5,)}
    for last, banned in at.items():
        assert sampling.at(array("i", [7, 6, last])).banned == banned
    assert sampling.at(array("i", [7, 6])).banned == (5,), "what the prompt ends with begins no word"
    assert sampling.at(array("i", [0, 7, 7])).banned == (5,)
    assert sampling.at(array("i", [0, 0, 7, 7])).banned == (5, 8)


def test_bad_words_and_ends_before_the_least_number_of_tokens_are_banned_together() -> None:
    sampling = SequenceSampling.of(SamplingParams(min_tokens=1), 1, [9], [(5,)])
    assert sampling.at(array("i", [1])).banned == (9, 5)


def test_the_answer_travels_only_where_it_has_a_format() -> None:
    plain = SequenceSampling(2, SamplingParams())
    assert plain.at(array("i", [1, 2, 3])).answer == b""
    structured = SequenceSampling(2, SamplingParams(response_format="json_object"))
    assert structured.at(array("i", [1, 2, 3])).answer == b"\x03\0\0\0"


def test_each_prompt_token_but_the_first_is_scored_once() -> None:
    prompt = array("i", range(10, 20))
    sampling = SequenceSampling(10, SamplingParams(prompt_logprobs=3))
    found: list[int] = []
    for start, end in ((0, 4), (4, 5), (5, 10)):
        scored = sampling.scored(prompt, start, end)
        assert scored is not None
        assert scored.top == 3
        found += array("i", scored.token_ids)
    assert found == prompt[1:].tolist()
    assert SequenceSampling(10, SamplingParams()).scored(prompt, 0, 10) is None
    assert SequenceSampling(1, SamplingParams(prompt_logprobs=3)).scored(array("i", [1]), 0, 1) is None
    beyond = sampling.scored(prompt + array("i", [5, 6]), 8, 12)  # the answer's tokens are not the prompt's
    assert beyond is not None
    assert array("i", beyond.token_ids).tolist() == [19]
    assert sampling.scored(prompt + array("i", [5, 6]), 9, 12) is None


def test_tokens_that_the_checkpoint_forbids_are_banned_everywhere_and_runs_go_on() -> None:
    sampling = SequenceSampling.of(SamplingParams(min_tokens=1, max_tokens=9), 1, [9], [], None, [4, 5])
    assert sampling.at(array("i", [1])).banned == (4, 5, 9)
    assert sampling.at(array("i", [1, 2])).banned == (4, 5)
    assert sampling.steady(array("i", [1, 2]), 100) == 8


def test_penalties_do_not_count_the_tokens_of_pictures() -> None:
    params = SamplingParams(repetition_penalty=1.5)
    sampling = SequenceSampling.of(params, 6, [], media=((1, 3), (4, 5)))
    spec = sampling.at(array("i", [10, 7, 7, 11, 7, 12, 13]))
    assert spec.history == array("i", [10, 11, 12, 13]).tobytes()
    assert (spec.prompt_tokens, spec.position) == (3, 1)
