"""Pictures in block keys: no two prompts with unlike pictures share a key from the first difference on."""

import random
from array import array

import pytest

from moonpool.base.cluster.proto_conversion import media_from_proto, media_to_proto
from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import block_keys, tokens_to_bytes
from moonpool.base.kv.media import MAX_MEDIA, MediaItem, media_digest, overlapping
from moonpool.base.kv.native_library import chain_keys

ROOT = bytes(range(32))
MARK, SEED = 7, 20_26


def cat(begin: int, end: int, content: bytes = b"cat") -> MediaItem:
    return MediaItem(begin, end, media_digest(content, ("auto", end - begin)), content)


def test_golden_vectors() -> None:
    digest = media_digest(b"cat", ("auto", 4))
    assert digest.hex() == "0e315c421717436a4f9936276aca481416fc24c5c875fccbf7bc27d7f4b89d1d"
    tokens = [*range(100, 102), MARK, MARK, MARK, MARK, *range(200, 206)]
    assert [key.hex() for key in block_keys(ROOT, tokens, 4, [MediaItem(2, 6, digest)])] == [
        "cadba19ef11750f81222bf5957696492b1f774f9b16c1101cb3b9d5d7842fc7b",
        "d7c6b7b0716d497fbb5fde7b8de0a14357113c4b5cfbdc4548b0a1123a4ad181",
        "66ea2aa6e0cfcf759ca6d34a8818fdf51f4d2cbc756d2f64df5c89fa3a2e0228",
    ]


def test_settings_and_content_are_told_apart_wherever_they_meet() -> None:
    parts = [(b"ab", ("c",)), (b"a", ("bc",)), (b"abc", ()), (b"ab", ("c", "")), (b"", ("ab", "c")), (b"ab", ("d",))]
    assert len({media_digest(content, settings) for content, settings in parts}) == len(parts)


def test_a_chain_with_pictures_extends_from_any_block_and_native_keys_are_the_same() -> None:
    tokens, media = array("i", [*range(10), *[MARK] * 30, *range(25)]), [cat(10, 21), cat(21, 40, b"dog")]
    whole = block_keys(ROOT, tokens, 8, media)
    for block in range(1, 8):
        behind = block_keys(whole[block - 1], tokens[8 * block :], 8, media, 8 * block)
        assert whole[:block] + behind == whole
    assert chain_keys(ROOT, tokens_to_bytes(tokens), 8, media) == whole


def test_text_before_a_picture_keeps_its_keys_and_everything_from_it_on_differs() -> None:
    tokens = [*range(20), *[MARK] * 9, *range(11)]
    text = block_keys(ROOT, tokens, 8)
    found = {kind: block_keys(ROOT, tokens, 8, [cat(20, 29, kind.encode())]) for kind in ("cat", "dog")}
    for keys in found.values():
        assert keys[:2] == text[:2]
    for at in range(2, 5):
        assert len({text[at], found["cat"][at], found["dog"][at]}) == 3


def test_ten_thousand_lists_of_pictures_share_keys_only_where_all_before_is_equal() -> None:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    contents, size = [b"", b"a", b"aa", bytes(36), bytes(72)], 8
    known: dict[bytes, object] = {}
    for _ in range(10_000):
        tokens, media = list[int](), list[MediaItem]()
        while len(tokens) < draw.choice((16, 24)):
            if draw.random() < 0.5:
                tokens += [draw.randrange(3) for _ in range(draw.randrange(1, 4))]
            else:
                length = draw.randrange(1, 12)
                media.append(cat(len(tokens), len(tokens) + length, draw.choice(contents)))
                tokens += [MARK] * length
        seen: list[object] = [("begin", item.begin, item.digest) for item in media]
        for at, key in enumerate(block_keys(ROOT, tokens, size, media)):
            end = (at + 1) * size
            content = (
                tuple(tokens[:end]),
                tuple(place for place, item in zip(seen, media, strict=True) if item.begin < end),
            )
            assert known.setdefault(key, content) == content
    assert len(set(map(repr, known.values()))) == len(known) > 10_000


def test_a_text_that_imitates_a_picture_has_another_key() -> None:
    """Tokens of a block twice as long that spell a picture's offset and digest."""
    item = cat(0, 4)
    spelled = array("i")
    spelled.frombytes(tokens_to_bytes([MARK] * 4) + bytes(4) + item.digest)
    assert block_keys(ROOT, spelled, len(spelled)) != block_keys(ROOT, [MARK] * 4, 4, [item])


def test_every_byte_of_a_digest_counts() -> None:
    """Peers have folded digests to 16 or 31 bits, and served other people's pictures."""
    digest, tokens = media_digest(b"cat", ()), [MARK] * 4
    known = {block_keys(ROOT, tokens, 4, [MediaItem(0, 4, digest)])[0]}
    for at in range(32):
        other = digest[:at] + bytes([digest[at] ^ 1]) + digest[at + 1 :]
        known.add(block_keys(ROOT, tokens, 4, [MediaItem(0, 4, other)])[0])
    assert len(known) == 33


@pytest.mark.parametrize(
    ("media", "why"),
    [
        ([MediaItem(0, 0, bytes(32))], "no place"),
        ([MediaItem(3, 9, bytes(32))], "no place"),
        ([MediaItem(0, 3, bytes(32)), MediaItem(2, 4, bytes(32))], "no place behind 3"),
        ([MediaItem(0, 3, bytes(31))], "32 bytes, not 31"),
        ([MediaItem(at, at + 1, bytes(32)) for at in range(MAX_MEDIA + 1)], f"at most {MAX_MEDIA}"),
    ],
)
def test_wrong_places_are_refused(media: list[MediaItem], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as error:
        media_from_proto(media_to_proto(media), "sequence.media", 8 if len(media) < 9 else 99)
    assert error.value.field == "sequence.media"


def test_pictures_may_fill_a_prompt_and_touch_each_other() -> None:
    media = [MediaItem(0, 3, bytes(32)), MediaItem(3, 8, bytes(32))]
    assert list(media_from_proto(media_to_proto(media), "sequence.media", 8)) == media


def test_pictures_travel_with_or_without_their_files() -> None:
    media = (cat(1, 3), cat(5, 6, b"dog"))
    assert [item.content for item in media_from_proto(media_to_proto(media), "m", 9)] == [b"cat", b"dog"]
    bare = media_from_proto(media_to_proto(media, content=False), "m", 9)
    assert bare == media
    assert [item.content for item in bare] == [b"", b""]
    assert overlapping(media, 2, 5) == [media[0]]
    assert overlapping(media, 3, 5) == []
