"""Reads named SQL statements from the `.sql` files beside the stores that run them."""

import re
from pathlib import Path


def read_statements(path: Path) -> dict[str, str]:
    """Return the statements of a file, by the names in the comment lines before them."""
    _, *parts = re.split(r"^-- name: (\w+)\n", path.read_text("utf-8"), flags=re.MULTILINE)
    return {
        name: text.strip().removesuffix(";")
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }
