"""Pictures through services on virtual time: answers are transformers', and KV is found for the same picture only."""

import dataclasses
from pathlib import Path

import pytest

from moonpool.client import AsyncClient, GenerateResult, InvalidRequest, Message, MessagePart, Picture, SamplingParams
from tests.pictures import PictureReference, add_weights, patch_model, picture_file, picture_model, square_model
from tests.unit.engine.models.test_mmproj import converted
from tests.world.cluster import Cluster, Simulation, until
from tests.world.process import in_new_process

pytest.importorskip("PIL")
BLOCK = 16
SIZE = ("--block-size", str(BLOCK), "--set", "blocks=256")
FLAGS = {
    "conductor": ["--set", "decode_prompt_tokens=0"],
    "decode": [*SIZE, "--speculative", "ngram", "--set", "preempt_every=7", "--set", "preemption=recompute"],
}
GREEDY = SamplingParams(max_tokens=BLOCK + 5, temperature=0.0, ignore_eos=True, logprobs=1)
GAP, ERROR = 1e-3, 1e-3
"""Of logits near 5 and log probabilities, in float32."""


def picture(width: int, height: int, seed: int, detail: str = "") -> Picture:
    return Picture(picture_file(width, height, seed), width, height, detail)


def turn(*parts: str | Picture) -> Message:
    found: list[MessagePart] = [{"text": part} if isinstance(part, str) else {"picture": part} for part in parts]
    return {"role": "user", "content": "", "parts": found}


def check(reference: PictureReference, messages: list[Message], result: GenerateResult) -> None:
    """Each token is transformers' best one, with its log probability."""
    files = [part["picture"].content for message in messages for part in message.get("parts", ()) if "picture" in part]
    inputs = reference.inputs(reference.text_of(messages), files)
    assert result.usage.prompt_tokens == inputs["input_ids"].shape[1]
    for choice in result.choices:
        logits = reference.logits(inputs, choice.token_ids)[:-1]
        own = logits[range(len(choice.token_ids)), choice.token_ids]
        assert (logits.amax(1) - own).max() < GAP
        for token, right in zip(choice.logprobs, own - logits.logsumexp(1), strict=True):
            assert abs(token.logprob - float(right)) < ERROR


async def start_again(cluster: Cluster, client: AsyncClient) -> None:
    """The prefill instance ends at once, and another one begins."""

    async def joined() -> bool:
        return any(instance.kind == "prefill" for instance in (await client.cluster_state()).instances)

    async def left() -> bool:
        return not await joined()

    cluster.services["prefill-0"].kill()
    await until(left, "prefill has left")
    await cluster.services["prefill-0"].start()
    await until(joined, "prefill has joined")


async def check_answers(
    simulation: Simulation,
    folder: Path,
    chunk: int = 64,
    further: tuple[str, ...] = (),
    *,
    checkpoint: Path | None = None,
) -> None:
    """Chunks of so many tokens, guesses, and sequences that are given up and computed again.

    `checkpoint`: what is served, if it is not the folder itself.
    """
    flags = FLAGS | {"prefill": [*SIZE, "--max-num-batched-tokens", str(chunk), *further]}
    reference, cluster = PictureReference(folder), Cluster(simulation, {}, flags, checkpoint=checkpoint or folder)
    await cluster.start()
    cat, dog = picture(40, 30, 1), picture(40, 30, 2)
    async with AsyncClient(cluster.addresses) as client:

        async def ask(messages: list[Message], sampling: SamplingParams = GREEDY) -> GenerateResult:
            result = await client.generate(messages=messages, sampling=sampling)
            check(reference, messages, result)
            return result

        for parts in (
            (cat, "What is this?"),
            (picture(70, 20, 3), "and", picture(20, 70, 4), "differ?"),
            (picture(1, 1, 5), picture(3, 200, 6), picture(129, 127, 7)),
            ("a " * 9, picture(50, 50, 9)),
        ):
            await ask([turn(*parts)])

        # The same picture in the same place is a hit, another one never.
        text = "Tell me about the following picture, please: "
        first, other, again = [await ask([turn(text, seen, "What is this?")]) for seen in (cat, dog, cat)]
        assert other.usage.cached_tokens == BLOCK, "what stands before the picture"
        assert again.usage.cached_tokens > again.usage.prompt_tokens - 2 * BLOCK
        assert first.token_ids == again.token_ids != other.token_ids
        encode_s = [(await client.explain(seen.request_id)).attempts[0].encode_s for seen in (other, again)]
        assert encode_s[0] > encode_s[1] == 0.0, "what is found needs no encoder"

        messages = [turn(picture(64, 64, 11), "Describe it.")]
        before = await ask(messages)
        messages += [{"role": "assistant", "content": before.text}, turn("Why? ", picture(30, 30, 12))]
        second = await ask(messages)
        assert second.usage.cached_tokens > before.usage.prompt_tokens - 2 * BLOCK

        await ask([turn("Twice: ", picture(33, 80, 13))], dataclasses.replace(GREEDY, n=2))

        # The KV behind another text is unknown, the encoded picture is not.
        await start_again(cluster, client)
        moved = await ask([turn("Behind another text: ", cat, "?")])
        attempt = (await client.explain(moved.request_id)).attempts[0]
        assert (attempt.encode_s, attempt.rows_tokens > 0) == (0.0, True), "it came from the kvstore"
        for wrong, why in (
            (dataclasses.replace(cat, width=41), "40 x 30 pixels, not 41 x 30"),
            (dataclasses.replace(cat, content=cat.content[:-30]), "cut or damaged"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await ask([turn(wrong)])
    await cluster.rest()


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(picture_model(tmp_path_factory.mktemp("model") / "tiny-smolvlm"))


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(patch_model(tmp_path_factory.mktemp("model") / "tiny-qwen"))


@pytest.fixture(scope="module")
def file(squares: Path) -> Path:
    with pytest.MonkeyPatch.context() as patches:
        return converted(squares, squares.with_name("files"), "Idefics3", patches).parent


@pytest.mark.slow
@in_new_process
async def test_answers_of_a_gguf_file_with_its_part_for_pictures(
    simulation: Simulation, squares: Path, file: Path
) -> None:
    await check_answers(simulation, squares, checkpoint=file)


@pytest.mark.slow
@in_new_process
async def test_answers_of_smolvlm_are_those_of_transformers_wherever_kv_comes_from(
    simulation: Simulation, squares: Path
) -> None:
    await check_answers(simulation, squares)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(square_model(tmp_path_factory.mktemp("model") / "tiny-gemma"))


@pytest.mark.slow
@in_new_process
async def test_answers_of_gemma_whose_pictures_see_themselves_both_ways(simulation: Simulation, whole: Path) -> None:
    await check_answers(simulation, whole, 24)


@pytest.mark.slow
@in_new_process
async def test_answers_of_qwen_with_stages(simulation: Simulation, cells: Path) -> None:
    """Each stage knows where rows and columns of pictures are."""
    await check_answers(simulation, cells, further=("--pipeline-parallel-size", "2"))


@in_new_process
async def test_answers_of_qwen_whose_positions_have_rows_and_columns(simulation: Simulation, cells: Path) -> None:
    await check_answers(simulation, cells)


@pytest.mark.slow
@in_new_process
async def test_an_engine_that_starts_again_reads_pictures_from_the_kvstore(simulation: Simulation, cells: Path) -> None:
    """Each picture has its store, by its digest; without stores it is encoded."""
    reference = PictureReference(cells)
    flags = FLAGS | {"prefill": SIZE}
    cluster = Cluster(simulation, {"kvstore": 2}, flags, checkpoint=cells)
    await cluster.start()
    pictures = [picture(40, 30, seed) for seed in range(6)]
    async with AsyncClient(cluster.addresses) as client:

        async def ask(text: str, shown: Picture) -> tuple[bool, bool]:
            """Whether the answer took an encoder, and rows of a kvstore."""
            messages = [turn(text, shown)]
            result = await client.generate(messages=messages, sampling=GREEDY)
            check(reference, messages, result)
            attempt = (await client.explain(result.request_id)).attempts[0]
            return attempt.encode_s > 0, attempt.rows_tokens > 0

        async def stored(count: int) -> None:
            async def there() -> bool:
                return await cluster.gauge("prefill-0", "pictures_stored_total") == count

            await until(there, f"{count} pictures are stored")

        for shown in pictures:
            assert await ask("Look: ", shown) == (True, False)
        await stored(len(pictures))
        held = [await cluster.gauge(f"kvstore-{number}", "picture_dram_bytes") for number in range(2)]
        assert min(held) > 0, "each picture has a store by its digest"
        assert await ask("The same again: ", pictures[0]) == (False, False), "the engine has these rows in memory"

        await start_again(cluster, client)
        for shown in pictures:
            assert await ask("Behind another text: ", shown) == (False, True)
        assert await cluster.gauge("prefill-0", "pictures_read_total") == len(pictures)
        assert await cluster.gauge("prefill-0", "pictures_missed_total") == 0
        assert await ask("Mine: ", picture(40, 30, 99)) == (True, False)

        for number in range(2):
            cluster.services[f"kvstore-{number}"].kill()
        await start_again(cluster, client)
        assert await ask("Without stores: ", pictures[0]) == (True, False)
        for number in range(2):
            await cluster.services[f"kvstore-{number}"].start()
    await cluster.rest()
