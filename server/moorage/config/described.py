"""All settings in words: the table of the docs, and the text of `moored serve --help`."""

import textwrap

from moorage.config.settings import settings


def settings_markdown() -> str:
    """Return the settings table of the docs."""
    rows = ["| Setting | Default | Accepts | What it does |", "|---|---|---|---|"]
    for each in settings().values():
        name = f"`{each.name}`" + (f", `{each.flag}`" if each.flag else "")
        rows.append(f"| {name} | {each.default} | {each.kind.expected} | {each.about} |")
    return "\n".join(rows) + "\n"


def settings_help() -> str:
    """Return the settings as plain lines, for `moored serve --help`."""
    lines = ["\b"]  # Keeps click from filling the lines again.
    for each in settings().values():
        lines.append(f"{each.environment} [{each.default}]")
        lines += textwrap.wrap(each.about, 72, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines).replace("`", "")
