"""What a picture may be, for all who look at one."""

from __future__ import annotations

MAX_PICTURES = 16
"""Pictures of one prompt."""
MAX_BYTES = 4 << 20
"""Bytes of one picture's file."""
MAX_TOGETHER_BYTES = 7 << 20
"""Bytes of the files of one prompt: they travel in one message with all else."""
MAX_PIXELS = 36_000_000
"""Pixels of one picture, by the head of its file: 108 MB once decoded."""
MAX_SECONDS = 10.0
"""Processor time that decoding may take."""
MEMORY_BYTES = 1 << 30
"""Address space of the process that decodes."""
ROWS_BYTES = 256 << 20
"""Most bytes of encoded pictures that an engine keeps."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
DETAILS = ("", "auto", "low", "high")
"""OpenAI's words for how closely the model looks; "" = auto."""
