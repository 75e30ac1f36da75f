"""The bundled model's training: the network, one step, and the loop around it."""

import math
import types

import pytest
import torch
from torch.nn import functional

from tests.unit.tools.bundled_instances import SMALL, SOURCE, small_model, small_tokenizer
from tools.bundled_model import training
from tools.bundled_model.config import CONTEXT, Shape
from tools.bundled_model.corpus import Corpus
from tools.bundled_model.network import rope_table
from tools.bundled_model.settings import Settings, parse_settings
from tools.bundled_model.step import Stepper, head_gradient, learning_rate
from tools.bundled_model.text import Document
from tools.bundled_model.training import Feed, Outcome, Stage, progress_line, stage_at, train


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Some text, and stages with windows that fit it."""
    monkeypatch.setattr(training, "STAGES", (Stage(0.5, 16), Stage(0.25, 32), Stage(0.25, 128)))
    return Corpus([Document("a.py", SOURCE * 20)], small_tokenizer(), test_share=1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second later at every look."""
    seconds = iter(range(10_000))
    fake = types.SimpleNamespace(monotonic=lambda: float(next(seconds)), process_time=lambda: float(next(seconds)))
    monkeypatch.setattr(training, "time", fake)


def settings(**changes: float) -> Settings:
    flags = {"seed": 7, "batch_tokens": 64, "every": 1e9, "copy_minutes": 1e9, **changes}
    return parse_settings(
        [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    )


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    cos, sin = rope_table(SMALL, 64)
    q, k = torch.randn(2, SMALL.head_dim, generator=torch.Generator().manual_seed(1))

    def rotated(x: torch.Tensor, place: int) -> torch.Tensor:
        return x * cos[place] + x.roll(SMALL.head_dim // 2, -1) * sin[place]

    first = torch.eye(SMALL.head_dim)[0]  # turns by one radian per place, towards its partner in the other half
    turned = rotated(first, 3)
    assert (turned[0].item(), turned[SMALL.head_dim // 2].item()) == pytest.approx((math.cos(3), math.sin(3)))
    torch.testing.assert_close(rotated(q, 41).norm(), q.norm())
    torch.testing.assert_close(rotated(q, 5) @ rotated(k, 2), rotated(q, 61) @ rotated(k, 58))
    assert abs(rotated(q, 5) @ rotated(k, 2) - rotated(q, 5) @ rotated(k, 3)) > 1e-3


def test_the_model_sees_nothing_of_what_follows() -> None:
    model = small_model()
    ids = torch.randint(SMALL.vocab_size, (2, 9), generator=torch.Generator().manual_seed(2))
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % SMALL.vocab_size
    one, two = model(ids), model(other)
    assert torch.equal(one[:, :6], two[:, :6])
    assert not torch.allclose(one[:, 6:], two[:, 6:])


def test_losses_do_not_depend_on_the_pieces() -> None:
    model = small_model()
    ids = torch.randint(SMALL.vocab_size, (2, 10), generator=torch.Generator().manual_seed(3))
    losses = torch.cat(list(model.losses(ids[:, :-1], ids[:, 1:], piece=4)))
    logits = model(ids[:, :-1]) @ model.embed_tokens.weight.T
    expected = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(losses, expected)


def test_head_gradient_equals_automatic_differentiation() -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 7, SMALL.hidden_size, generator=generator, requires_grad=True)
    targets = torch.randint(SMALL.vocab_size, (2, 7), generator=generator)
    loss, gradient = head_gradient(model, hidden.detach(), targets, piece=5)
    ours = model.embed_tokens.weight.grad
    expected = functional.cross_entropy((hidden @ model.embed_tokens.weight.T).flatten(0, 1), targets.flatten())
    theirs, embedding = torch.autograd.grad(expected, (hidden, model.embed_tokens.weight))
    assert loss == pytest.approx(expected.item(), rel=0.01)  # ours multiplies in bfloat16
    torch.testing.assert_close(gradient, theirs, rtol=0.05, atol=5e-4)
    assert ours is not None
    torch.testing.assert_close(ours, embedding, rtol=0.05, atol=5e-3)


def test_a_step_moves_every_weight_as_far_as_its_factor_lets_it() -> None:
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    rows = torch.randint(SMALL.vocab_size, (4, 17), generator=torch.Generator().manual_seed(6))
    stepper = Stepper(model, muon_lr=1e-2, adam_lr=1e-2, weight_decay=0.1)
    first = stepper.step(rows, 0.0)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    losses = [stepper.step(rows, 1.0) for _ in range(8)]
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert losses[0] == first
    assert losses[-1] < 0.95 * first


def test_rate_warms_up_and_decays_to_nothing() -> None:
    rates = [learning_rate(i / 100) for i in range(101)]
    assert rates[:3] == [0.02, 0.5, 1.0]
    assert set(rates[2:41]) == {1.0}
    assert rates[70] == pytest.approx(0.5)
    assert rates[100] == 0.0


def test_stages_follow_progress() -> None:
    assert [stage_at(p) for p in (0.0, 0.79, 0.81, 0.89, 0.91, 1.0)] == [0, 0, 1, 1, 2, 2]
    assert sum(stage.share for stage in training.STAGES) == pytest.approx(1.0)
    assert training.STAGES[-1].length == CONTEXT


def test_batches_have_the_tokens_of_a_step_or_one_longer_window(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = Feed(corpus, batch_tokens=64, seed=7)
    batches = [feed.batch(progress) for progress in (0.0, 0.4, 0.6, 0.9)]
    assert [tuple(batch.shape) for batch in batches] == [(4, 17), (4, 17), (2, 33), (1, 129)]
    assert not torch.equal(batches[0], batches[1])
    assert torch.equal(batches[2][0], next(corpus.rows(32, seed=7 + 1)))
    assert capsys.readouterr().out.splitlines() == [
        "stage 1: windows of 16 tokens",
        "stage 2: windows of 32 tokens",
        "stage 3: windows of 128 tokens",
    ]


@pytest.mark.usefixtures("clock")
def test_training_ends_with_its_tokens(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    """16 steps of 64 tokens, then 8 of 64 (two rows of 32), then 4 of 128."""
    done = train(small_model(), corpus, settings(), 2048, save=lambda: pytest.fail("no copy is due"))
    assert (done.steps, done.tokens) == (28, 2048)
    assert done.minutes == pytest.approx(30 / 60)  # a second for each step, two at the ends
    assert done.cpu_minutes == pytest.approx(30 / 60)
    assert 1.0 < done.final_loss < 5.6  # ln(300) is 5.7
    assert capsys.readouterr().out.splitlines()[-1] == progress_line(done, 2048, learning_rate(1920 / 2048), 29.0)


@pytest.mark.usefixtures("clock")
def test_training_repeats_with_its_seed(corpus: Corpus) -> None:
    models = [small_model() for _ in range(2)]
    for model in models:
        train(model, corpus, settings(), 256, save=lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.usefixtures("clock")
def test_the_first_copy_comes_early(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    copies_at: list[int] = []

    def save() -> None:
        copies_at.append(capsys.readouterr().out.count("step ") + sum(copies_at[-1:]))

    train(small_model(), corpus, settings(copy_minutes=0.1, every=1), 64 * 16, save)
    # The clock ticks twice before the first step (its own look and the processor's) and once for each step after; a
    # copy is due after a fifth of 6 s, then every 6 s.
    assert copies_at == [1, 7, 13]


def test_a_progress_line_says_what_is_left() -> None:
    line = progress_line(Outcome(steps=5, tokens=1_000_000, final_loss=3.25), 4_000_000, 0.5, spent_s=120.0)
    assert line == "step     5  tokens   1.00M/4.00M  loss 3.2500  lr 0.500     8333 tok/s    2.0 min,   6.0 left"


def test_every_flag_has_its_field_and_the_folder_is_the_bundled_one() -> None:
    plain = parse_settings([])
    assert (plain.out.parts[-3:], plain.tokens, plain.minutes) == (("moonpool", "bundled", "tiny"), 7_500_000, None)
    assert parse_settings(["--every", "3", "--minutes", "2"]).every_s == 3.0
    with pytest.raises(SystemExit):
        parse_settings(["--tokens", "1", "--minutes", "1"])


def test_the_weights_fit_their_limit() -> None:
    """Two bytes for each parameter of the model as it is shipped."""
    shape = Shape()
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_attention_heads + shape.num_key_value_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    total = shape.vocab_size * shape.hidden_size + shape.num_hidden_layers * layer + shape.hidden_size
    assert total == 4_737_792
