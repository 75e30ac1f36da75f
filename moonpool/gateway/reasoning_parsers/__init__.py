"""Splits thinking and answers; the marks of each family are in `moonpool.base.answer_formats`."""
