"""The bundled checkpoint's model card."""

from hashlib import sha256

from moonpool.base.bundled import model_dir


def test_the_card_is_about_the_weights_beside_it() -> None:
    weights = model_dir() / "model.safetensors"
    assert f"`{sha256(weights.read_bytes()).hexdigest()}`" in (model_dir() / "README.md").read_text(encoding="utf-8")
