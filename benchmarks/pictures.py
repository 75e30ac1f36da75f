"""What a picture costs, by what is known already: `python -m benchmarks.pictures [--side 512] [--tiny]`.

Milliseconds of processor time of one picture in a prompt of a model in the size of SmolVLM-256M, with random weights:
its file, the encoder, and the prompt; then the same with known rows, and with known KV. The rows also go to a kvstore
and come back: both sides together, over gRPC. Beside stands a prompt of text with as many tokens. With the detail "low"
the picture is one square, else SmolVLM cuts it.
"""

import argparse
import asyncio
import json
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame import Progress, Row, optional, paired, run
from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.kv.keys import BlockKey, tokens_to_bytes
from moonpool.base.kv.media import MediaItem
from moonpool.base.kv.picture_rows import rows_layout
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.file_process import decode
from moonpool.base.pictures.files import Picture
from moonpool.base.pictures.rule import with_pictures
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.steps import ENCODER, PlacedPicture, SequenceSampling, SequenceStep
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.pictures import packed_rows
from moonpool.engine.models.stage import StageModel
from moonpool.engine.picture_rows import PictureStores
from moonpool.engine.request import IncomingRequest, RequestRows
from moonpool.v1 import kv_pb2
from tests.pictures import add_weights, picture_file, smolvlm_model
from tests.unit.kvstore.rig import Rig, rig

BLOCK, CHUNK, BEHIND = 64, 512, 16
"""Tokens of a block and of a chunk, and of the text behind the picture."""
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip
TEXT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip


def model(folder: Path, *, tiny: bool) -> Path:
    """Write the model; `tiny`: the one of the tests."""
    smolvlm_model(folder)
    if not tiny:
        _change(folder / "config.json", {"vision_config": VISION, "text_config": TEXT, "scale_factor": 4})
        sizes = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}}
        _change(folder / "preprocessor_config.json", sizes)
        _change(folder / "processor_config.json", {"image_seq_len": 64})
    return add_weights(folder)


def _change(path: Path, values: dict[str, Any]) -> None:
    found: dict[str, Any] = json.loads(path.read_text())
    for name, value in values.items():
        found[name] = {**found[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(found))


@dataclass(slots=True)
class Prompt:
    """A prompt whose KV is computed here."""

    stage: StageModel
    step: SequenceStep
    pool: torch.Tensor

    def compute(self, begin: int) -> None:
        """Compute the tokens from `begin` on, in chunks."""
        total = len(self.step.token_ids) // 4
        for start in range(begin, total, CHUNK):
            end = min(total, start + CHUNK)
            media = tuple(item for item in self.step.media if item.begin < end and start < item.end)
            part = SequenceStep(self.step.token_ids[4 * start : 4 * end], start, self.step.block_table, media=media)
            batch = PackedBatch.build([(part.token_ids, start, part.block_table)], BLOCK)
            hidden = self.stage.embed(batch.token_ids, batch.positions)
            if media:
                assert self.stage.pictures is not None
                self.stage.pictures.place(hidden, [part], batch)
            self.stage.run(hidden, batch, self.pool, 0, self.stage.layer_end)


class Kept:
    """A picture's rows in a kvstore, put by one engine and read by another one."""

    def __init__(self, rule: PictureRule, item: MediaItem, rows: bytes) -> None:
        self._rule, self._item, self._rows = rule, item, rows

    async def spent_ms(self) -> tuple[float, float]:
        """Milliseconds for taking the rows, and for giving them.

        Raises:
            RuntimeError: other rows came back.
        """
        async with rig(dram_bytes=1 << 30, picture_share=0.5) as store:
            engines = [self._engine(store) for _ in range(2)]
            tasks = [asyncio.ensure_future(engine.run()) for engine in engines]
            await asyncio.sleep(0)  # they begin
            encoded = PlacedPicture(0, self._item.end, ENCODER, 1, self._item.digest, self._rows)
            (await self._asked(engines[0], store)).placed(encoded)
            began = time.process_time()
            await engines[0].idle(60)
            put = time.process_time()
            found = (await self._asked(engines[1], store, held=True)).known
            read = time.process_time()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if list(found.values()) != [self._rows]:
            raise RuntimeError("the kvstore has not given the rows back")
        return 1e3 * (put - began), 1e3 * (read - put)

    def _engine(self, store: Rig) -> PictureStores:
        grid = self._rule.grid(self._item.width, self._item.height, self._item.detail)
        row_bytes = len(self._rows) // self._rule.tokens(grid).count(self._rule.mark)

        def endpoint(address: str) -> KVEndpoint:
            return KVEndpoint(store.channels, address, kv_pb2.StreamHello(), rows_layout(row_bytes))

        return PictureStores(bytes(32), self._rule, row_bytes, endpoint, lambda tenant: ())

    async def _asked(self, engine: PictureStores, store: Rig, *, held: bool = False) -> RequestRows:
        item, kept = self._item, kv_pb2.Instance(id="kvstore-0", address=store.address, epoch=9)
        spec = EngineRequest((), item.end, item.end)
        request = IncomingRequest("r", array("i"), BlockKey(bytes(32)), SequenceSampling(item.end), spec, media=(item,))
        found = await engine.added(request, [kv_pb2.MediaItem(digest=item.digest, rows_store=kept, rows_held=held)])
        assert found.rows is not None
        return found.rows


def _spent_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    optional("PIL")
    optional("transformers")
    with tempfile.TemporaryDirectory(prefix="moonpool-pictures-") as folder:
        path = model(Path(folder), tiny=options.tiny)
        progress("the model is written")
        config, tokenizer = load_config(path), Tokenizer.load(path)
        stage = load_stage(path, config, torch.float32, 0, config.num_layers)
        progress("the model is loaded")
        details = ("low", "high")
        with torch.inference_mode():
            return [row for detail in details for row in _rows(options, path, tokenizer, stage, detail, progress)]


def _rows(
    options: argparse.Namespace, path: Path, tokenizer: Tokenizer, stage: StageModel, detail: str, progress: Progress
) -> list[Row]:
    rule, side, config = read_rule(path, lambda: tokenizer), options.side, stage.config
    assert not isinstance(rule, str), rule
    assert stage.pictures is not None
    found: dict[str, list[tuple[float, float]]] = {}
    count = 0
    for number in range(options.runs):
        content = picture_file(side, side, number)
        seen = [rule.mark, *tokenizer.encode("What is in the picture? " * BEHIND, False)[:BEHIND]]
        tokens, media = with_pictures("prompt", rule, seen, [Picture(content, side, side, detail)])
        count = len(tokens)
        table = tuple(range(-(-count // BLOCK)))
        pool = torch.zeros(config.num_layers, len(table), config.num_kv_heads, 2, BLOCK, config.head_dim)
        shown = Prompt(stage, SequenceStep(tokens_to_bytes(tokens), 0, table, media=media), pool)
        words = tokenizer.encode("some words of a text " * count, False)[:count]
        plain = Prompt(stage, SequenceStep(tokens_to_bytes(words), 0, table), pool)
        text_ms = _spent_ms(partial(plain.compute, 0))
        asked, behind = [Picture(content, side, side, detail)], media[0].end // BLOCK * BLOCK
        for what, work in (
            ("its file, decoded", partial(decode, content)),
            ("its tokens and digest", partial(with_pictures, "prompt", rule, seen, asked)),
            ("the encoder", partial(stage.pictures.rows, media[0])),
            ("the prompt, with known rows", partial(shown.compute, 0)),
            ("the prompt, with known KV", partial(shown.compute, behind)),
        ):
            found.setdefault(what, []).append((_spent_ms(work), text_ms))
        rows = packed_rows(stage.pictures.rows(media[0]))
        for what, spent in zip(
            ("its rows, to a kvstore", "its rows, of a kvstore"),
            asyncio.run(Kept(rule, media[0], rows).spent_ms()),
            strict=True,
        ):
            found.setdefault(what, []).append((spent, text_ms))
        progress(f"{side} pixels, detail {detail}, {count} tokens: run {number + 1} of {options.runs}")
    limit = f"text of {count} tokens, ms"
    return [
        paired(f"{side} pixels, {detail}: {what}", "ms", pairs, limit, less_is_better=True)
        for what, pairs in found.items()
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--side", type=int, default=512, help="pixels of each side (default 512)")
    parser.add_argument("--tiny", action="store_true", help="the tests' model, to try the benchmark")


if __name__ == "__main__":
    run("pictures", measure, flags=flags)
