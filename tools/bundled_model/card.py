"""The model card: what the run was, in words and figures. Computes nothing but roundings."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence

import tokenizers
import torch

from tools.bundled_model.config import BOS, CONTEXT, EOS, Shape
from tools.bundled_model.evaluation import Evaluation
from tools.bundled_model.samples import TEMPERATURE, TOP_P, Sample
from tools.bundled_model.settings import Settings
from tools.bundled_model.text import Split
from tools.bundled_model.training import STAGES, Outcome

#: The cards of copies that are written before the run is over.
UNFINISHED = "This copy was written in the middle of training; the finished card replaces it.\n"
UNMEASURED = "Training has ended; evaluation is under way.\n"


@dataclasses.dataclass(frozen=True)
class Run:
    """What the card tells of: the run's settings, its texts, and what came of it."""

    settings: Settings
    shape: Shape
    split: Split
    epoch_tokens: int
    outcome: Outcome
    evaluation: Evaluation
    samples: Sequence[Sample]
    parameters: int
    weight_bytes: int


def make_card(run: Run) -> str:
    """Return the text of the model card, in Markdown with the hub's front matter."""
    return f"""{_head(run)}
{_figures(run)}
{_making(run)}
## Prompts

Plain prompts are Python source or reference prose. The chat template writes the words of `user` and `system` as
comment lines and the reply as plain text after `# assistant:`; a reply ends with `{EOS}`. Earlier turns keep their
exact text when a conversation goes on, so their KV cache can be reused.

{_samples(run)}
## Licences

The weights, tokenizer and this card are under Apache-2.0. The training text is CPython's, under the Python Software
Foundation licence (PSF-2.0); the model can repeat passages of it.
"""


def _head(run: Run) -> str:
    millions, size = run.parameters / 1e6, run.weight_bytes
    return f"""---
license: apache-2.0
language:
- en
tags:
- code
- python
---

# Moonpool's bundled model

A Llama of {millions:.2f} million parameters ({size:,} bytes as bfloat16) that writes text in the manner of the
Python standard library. It exists so that Moonpool's demos and tests run with no download. It is not a useful
assistant: it knows no facts to rely on, and its code looks like code but is seldom right.
"""


def _figures(run: Run) -> str:
    result, stride = run.evaluation, run.settings.stride
    curve = " ".join(f"| {value:.3f}" for value in result.by_block)
    heads = " ".join(f"| {i}k-{i + 1}k" for i in range(len(result.by_block)))
    verdict = (
        "so what stands far back does help the model."
        if result.same_text_last < result.same_text_first
        else "so the difference in the table comes from the text at\nthose positions: this model does not profit from"
        " what stands far back, it only about keeps its level up to 8k."
    )
    return f"""## Figures

Held-out bits per byte of the saved bfloat16 weights, computed in float32, lower is better:

| positions in the window | bits per byte |
|---|---|
| 0-1k (0 to 1023) | {result.first:.3f} |
| 7-8k (7168 to 8191) | {result.last:.3f} |

These are over {result.windows} windows of {CONTEXT} tokens, each within one of the {result.files} held-out files that
are long enough, with a window every {stride} tokens. The two rows above average over slightly different text.
Over exactly the same tokens, the figures are {result.same_text_first:.3f} when they stand at 0-1k and
{result.same_text_last:.3f} when they stand at 7-8k, {verdict} By position:

{heads} |
{"|---" * len(result.by_block)}|
{curve} |

Over all {len(run.split.held_out)} held-out files (short ones too, each from its start) it is {result.whole:.3f}.
"""


def _making(run: Run) -> str:
    settings, shape, split, outcome = run.settings, run.shape, run.split, run.outcome
    muon, adam = settings.muon_lr, settings.adam_lr
    stages = ", then ".join(f"{stage.share:.0%} on windows of {stage.length}" for stage in STAGES)
    note = f"\n{settings.note}\n" if settings.note else ""
    return f"""## How it was made

`python -m tools.bundled_model` (in Moonpool's repository) makes all files of this folder from the Python
installation it runs on.

- Text: the source of CPython {platform.python_version()}'s standard library and the language reference topics that
  `pydoc` carries, {split.training_bytes / 1e6:.1f} MB in {len(split.training)} texts, after dropping duplicates, data
  tables, codecs and files that are not UTF-8. {len(split.held_out)} more texts
  ({split.held_out_bytes / 1e6:.2f} MB), {settings.held_out_percent:g} % by a hash of the name, were held out from both
  tokenizer and model. Copies in part (a test that repeats another's lines) can still be on both sides.
- Each epoch ({run.epoch_tokens / 1e6:.2f} million tokens) has the library, {settings.test_share:.0%} of its test suite,
  and conversations derived from the library: the summary line of a docstring as the user's words, the function or
  class as the reply.
- Tokenizer: byte-level BPE with {shape.vocab_size} entries, trained on the same text. A text begins with `{BOS}` and
  ends with `{EOS}`.
- Model: {shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, {shape.num_attention_heads} query heads and
  {shape.num_key_value_heads} key/value heads of {shape.head_dim}, feed-forward {shape.intermediate_size}, tied
  embeddings, rotary base {shape.rope_theta:g}, context {CONTEXT}.
- Training: {outcome.tokens / 1e6:.2f} million tokens ({outcome.tokens / max(run.epoch_tokens, 1):.1f} epochs) in
  {outcome.steps} steps of {settings.batch_tokens} tokens (or one longer window):
  {stages}.
  Muon (rate {muon:g}) for the matrices and AdamW (rate {adam:g}) for embedding and norms, warm-up,
  plateau and linear decay to zero, bfloat16 autocast, seed {settings.seed}. Last training loss
  {outcome.final_loss:.3f} nats per token.
- Time: {outcome.minutes:.1f} minutes for the training loop with {settings.threads} threads
  ({outcome.cpu_minutes / settings.threads:.1f} minutes of processor time per thread), torch {torch.__version__},
  tokenizers {tokenizers.__version__}.
{note}
The same command with another Python version sees other text and gives other figures; on another processor the last
digits differ.
"""


def _samples(run: Run) -> str:
    count, seed = run.settings.sample_tokens, run.settings.seed
    shown = "\n".join(
        f"Prompt:\n\n```text\n{sample.prompt.rstrip()}\n```\n\n"
        f"{f'Drawn at temperature {sample.temperature:g}' if sample.temperature else 'Greedy'}"
        f"{', ended by `</s>`' if sample.ended else f', cut at {count} tokens'}:\n\n"
        f"```text\n{sample.text.strip(chr(10))}\n```\n"
        for sample in run.samples
    )
    return f"""## Samples

From the saved weights in float32: greedy, then drawn at temperature {TEMPERATURE:g} with top-p {TOP_P:g}
(seed {seed}), unedited. Trained this briefly, the model repeats itself, above all when it is decoded greedily.

{shown}"""
