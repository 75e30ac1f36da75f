"""Our `kernels` package is not mistaken for the Hugging Face distribution of the same name."""

from pathlib import Path

from transformers.utils.import_utils import is_kernels_available

import kernels


def test_transformers_does_not_take_it_for_the_other_one() -> None:
    assert not is_kernels_available()


def test_the_package_itself_is_empty() -> None:
    assert Path(str(kernels.__file__)).read_text() == ""
