"""Tables of numbers in Markdown."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table whose columns after the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows]) + "\n"
