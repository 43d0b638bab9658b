"""Declarations of settings: kinds that several packages use, and texts for the docs.

`config` combines the daemon's own settings with those of each kind of backend.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, get_args, get_type_hints

PREFIX: Final = "MOORAGE_"
"""Start of a setting's name in the environment; the setting's own name in capitals follows."""
NAME_CHARS_MAX: Final = 253
"""Maximum characters of a name, such as the id of a cluster."""


@dataclass(frozen=True, slots=True)
class SettingKind:
    """The kind of a setting: its accepted values.

    Args:
        expected: The accepted values in words, for errors and the table.
        read: Returns the setting for a text or a TOML value; raises ValueError to refuse it.
    """

    expected: str
    read: Callable[[object], object]


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a setting, without its type and its default.

    Args:
        about: The effect of the setting, for operators.
        flag: The setting's flag of `moored serve`; empty if it has none.
        default: The setting's default as an operator would write it.
        name: The setting's key in the TOML file, and the attribute that it becomes.
    """

    kind: SettingKind
    about: str
    flag: str = ""
    default: str = ""
    name: str = ""

    @property
    def environment(self) -> str:
        """The name of the setting in the environment."""
        return PREFIX + self.name.upper()


def read_settings(owner: type) -> dict[str, Setting]:
    """Return the settings that a dataclass declares in the annotations of its fields, by name."""
    hints = get_type_hints(owner, include_extras=True)
    found: dict[str, Setting] = {}
    for each in dataclasses.fields(owner):
        setting = next((x for x in get_args(hints[each.name]) if isinstance(x, Setting)), None)
        if setting is not None:
            default = setting.default or f"`{plain(each.default)}`"
            found[each.name] = dataclasses.replace(setting, name=each.name, default=default)
    return found


def plain(value: object) -> str:
    """Return a value in the form in which an operator writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    # `2.0` is written `2`, and a year in seconds without an exponent.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def whole(low: int, high: int) -> SettingKind:
    """Return the kind of whole numbers between two bounds, both included."""
    read = partial(_read_number, int, low, high)
    return SettingKind(f"a whole number from {low} to {high}", read)


def seconds(low: float, high: float) -> SettingKind:
    """Return the kind of durations between two bounds, both included."""
    read = partial(_read_number, float, low, high)
    return SettingKind(f"seconds from {plain(low)} to {plain(high)}", read)


def choice(*names: str) -> SettingKind:
    """Return the kind of settings whose value is one of a few names."""

    def read(value: object) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return SettingKind(" or ".join(f"`{name}`" for name in names), read)


def choices(*names: str) -> SettingKind:
    """Return the kind of settings whose value is a list of some of a few names."""

    def read(value: object) -> tuple[str, ...]:
        if not set(chosen := read_list(value)) <= set(names):
            raise ValueError
        return tuple(dict.fromkeys(chosen))

    return SettingKind(f"a list of {' and '.join(f'`{name}`' for name in names)}", read)


def read_list(value: object) -> list[str]:
    """Return a list of texts, also from one text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError
    return [part.strip() for part in parts if part.strip()]


def _read_number(kind: type[int] | type[float], low: float, high: float, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, kind | int | str):
        raise ValueError  # noqa: TRY004  # A reader has one way to refuse, whatever it was.
    number = kind(value)
    if not low <= number <= high or not math.isfinite(number):
        raise ValueError
    return number


def _read_names(value: object) -> tuple[str, ...]:
    return tuple(_read_name(name) for name in read_list(value))


def _read_switch(value: object) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _read_name(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or value != value.strip():
        raise ValueError
    if not 0 < len(value) <= NAME_CHARS_MAX:
        raise ValueError
    return value


def _read_folder(value: object) -> Path:
    text = str(value) if isinstance(value, str | Path) else ""
    if not text or "\0" in text:
        raise ValueError
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # `~name` of a user that does not exist.
        raise ValueError from error


FOLDER: Final = SettingKind("a folder", _read_folder)
FILE: Final = SettingKind("a file", _read_folder)
SWITCH: Final = SettingKind("`true` or `false`", _read_switch)
NAME: Final = SettingKind(f"a text of 1 to {NAME_CHARS_MAX} characters", _read_name)
NAMES: Final = SettingKind("names, separated by commas (in the file a list)", _read_names)
