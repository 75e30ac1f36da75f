"""The table of formats in docs/gateway.md: `python -m tests.unit.gateway.formats_table` prints it."""

from moonpool.base.answer_formats import FORMAT_ROWS


def formats_table() -> str:
    """The table in Markdown, a line a row."""
    lines = ["| `--tool-call-parser` | models | a call | thinking |", "|---|---|---|---|"]
    for row in FORMAT_ROWS:
        names = ", ".join(f"`{name}`" for name in row.names)
        thinking = ", ".join(f"`{form.begin.strip()}`" for form in row.reasoning)
        cells = (names, row.models, f"`{row.example}`", thinking or "-")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(formats_table())
