"""`moorage run --out DIR`: download the files of a run's folder into an empty folder."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from moorage.records.json_values import JsonObject
from moorage.records.replies import FilePart, RunFileList
from moorage_client.answers import UnreadableError, read_as
from moorage_client.cli.output import note
from moorage_client.errors import MoorageError

if TYPE_CHECKING:
    from moorage_client.client import Client

FETCHED_BYTES_MAX: Final = 1 << 30
"""Maximum bytes that are fetched of all files of a run together."""
_SHOWN_MAX: Final = 10


def check_folder(folder: Path) -> Path:
    """Return the folder for the files; create it if it does not exist.

    Raises:
        typer.BadParameter: The folder is not empty, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise typer.BadParameter(f"--out {folder}: expected an empty folder, or a new one")
    except OSError as error:
        raise typer.BadParameter(f"--out {folder}: {error.strerror}") from error
    return folder.resolve()


async def fetch(client: "Client", lease: str, token: str, folder: Path) -> bool:
    """Download the files of the last run of a lease; return whether all were downloaded.

    Print the skipped files. Stop at a path that leads out of the folder, since the machine that ran
    the workload chose the path.
    """
    message = {"op": "files", "lease": lease, "token": token}
    try:
        found = read_as(RunFileList, await client.call(message))
        left_out = [f"{each.path}: {each.reason}" for each in found.left_out]
        size = 0
        for each in found.files:
            size += each.size
            if size > FETCHED_BYTES_MAX:
                left_out.insert(0, f"{each.path} and the files after it: at most 1 GiB is fetched")
                break
            await _file(client, message | {"attempt": found.attempt}, each.path, folder)
    except (MoorageError, OSError) as error:
        note(f"moorage: files of lease {lease} were not fetched: {error}")
        return False
    for line in left_out[:_SHOWN_MAX]:
        note(f"moorage: not fetched: {line}")
    if len(left_out) > _SHOWN_MAX:
        note(f"moorage: and {len(left_out) - _SHOWN_MAX} more")
    return not left_out


async def _file(client: "Client", message: JsonObject, path: str, folder: Path) -> None:
    parts = path.split("/")
    if any(each in {"", ".", ".."} or "\0" in each for each in parts):
        raise UnreadableError(f"the path {path!r} leads out of the folder")
    place = folder.joinpath(*parts)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.parent.resolve().is_relative_to(folder):
        raise UnreadableError(f"the path {path!r} leads out of the folder")
    with place.open("xb") as file:
        over, offset, size = False, 0, 0
        while not over:
            answer = await client.call(message | {"path": path, "offset": offset})
            part = read_as(FilePart, answer)
            data = base64.b64decode(part.base64, validate=True)
            size += len(data)
            if (not part.over and part.offset <= offset) or size > FETCHED_BYTES_MAX:
                raise UnreadableError(f"the file {path!r} does not end")
            file.write(data)
            over, offset = part.over, part.offset
