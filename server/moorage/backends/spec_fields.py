"""The types of the fields of specs; the error for a wrong value states the expected value."""

import re
from typing import Annotated, Final

import pydantic

from moorage.records.json_values import JsonValue

CPUS_MAX: Final = 65_536
"""Maximum processors, and GPUs, in a spec."""
START_SECONDS_MAX: Final = 86_400.0
"""Longest time in seconds until a workload must be ready, in a spec."""
STOP_SECONDS_MAX: Final = 3_600.0
"""Longest time in seconds from SIGTERM to SIGKILL in a spec.

A workload may outlive its lease by this time.
"""
PROBE_SECONDS_MIN: Final = 0.01
PROBE_SECONDS_MAX: Final = 3_600.0
MEMORY_BYTES_MAX: Final = 1 << 60
NO_DEVICES: Final = {
    "NVIDIA_VISIBLE_DEVICES": "void",
    "AMD_VISIBLE_DEVICES": "",
    "ASCEND_VISIBLE_DEVICES": "",
    "HABANA_VISIBLE_DEVICES": "",
}
"""Variables that make container runtimes give a container no devices.

An image's own variables count only if these variables are not set."""
MEMORY_DELAY_SECONDS_MAX: Final = 60.0
"""Longest delay in seconds in a `MemoryResourceSpec`."""
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MEMORY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("expected a text without NUL characters")
    return text


def _number(given: object) -> object:
    if isinstance(given, bool):
        raise ValueError("expected a number")  # noqa: TRY004  # Pydantic expects ValueError.
    return given


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("expected a text that is not empty")
    return text


def _program(command: list[str]) -> list[str]:
    if not command or not command[0]:
        raise ValueError("expected a list of texts, the program first")
    return command


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("expected names of variables, without '='")
    return name


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("expected an absolute path")
    return path


Text = Annotated[str, pydantic.AfterValidator(_no_nul)]
"""A text without NUL characters, as the operating system requires."""
Name = Annotated[Text, pydantic.AfterValidator(_not_empty)]
Command = Annotated[list[Text], pydantic.AfterValidator(_program)]
"""A program and its arguments."""
Environment = dict[Annotated[Text, pydantic.AfterValidator(_variable)], Text]
Folder = Annotated[Text, pydantic.AfterValidator(_absolute)]
_NOT_YES = pydantic.BeforeValidator(_number)
"""A validator that refuses `true` as a number. It is the last annotation, so that it runs first."""
Port = Annotated[int, pydantic.Field(ge=1, le=65_535), _NOT_YES]
FreePort = Annotated[int, pydantic.Field(ge=0, le=65_535), _NOT_YES]
"""A port number; 0 means any free port."""
Count = Annotated[int, pydantic.Field(ge=0, le=CPUS_MAX), _NOT_YES]
Copies = Annotated[int, pydantic.Field(ge=1, le=CPUS_MAX), _NOT_YES]
Cpus = Annotated[float, pydantic.Field(gt=0, le=CPUS_MAX, allow_inf_nan=False), _NOT_YES]
StartSeconds = Annotated[
    float, pydantic.Field(gt=0, le=START_SECONDS_MAX, allow_inf_nan=False), _NOT_YES
]
StopSeconds = Annotated[
    float, pydantic.Field(ge=0, le=STOP_SECONDS_MAX, allow_inf_nan=False), _NOT_YES
]
ProbeSeconds = Annotated[
    float, pydantic.Field(ge=PROBE_SECONDS_MIN, le=PROBE_SECONDS_MAX, allow_inf_nan=False), _NOT_YES
]

MemoryDelay = Annotated[
    float, pydantic.Field(ge=0, le=MEMORY_DELAY_SECONDS_MAX, allow_inf_nan=False)
]


def memory_bytes(given: int | str) -> int:
    """Return a number of bytes, from a number or a text such as `512m`, `2g`, `1.5GiB`.

    Raises:
        ValueError: The value has another form, or exceeds the memory of any machine.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        size = float(min(given, 2 * MEMORY_BYTES_MAX))
    else:
        match = _MEMORY.fullmatch(given.strip()) if isinstance(given, str) else None
        size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size <= MEMORY_BYTES_MAX:
        raise ValueError("expected bytes, or text such as 512m or 2g")
    return int(size)


def _memory(given: JsonValue) -> int | str:
    memory_bytes(given)
    size: int | str = given
    return size


def _devices(given: JsonValue) -> int | str | list[str]:
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= CPUS_MAX:
        return given
    if given == "all" or (isinstance(given, list) and all(isinstance(id_, str) for id_ in given)):
        named: str | list[str] = given
        return named
    raise ValueError("expected a number from 0 on, a list of ids, or all")


Memory = Annotated[int | str, pydantic.PlainValidator(_memory)]
"""An amount of memory: bytes, or a text such as `512m` or `2g`."""
Devices = Annotated[int | str | list[str], pydantic.PlainValidator(_devices)]
"""GPUs: their number, a list of ids, or `all`."""
