"""Records the terminal in the README: real commands to a real server.

`tests/docs/test_picture.py` fails if the server gives another answer than the picture shows.

python tools/recording.py    write docs/pictures/first-lease.svg
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from moorage.testing.daemon_process import daemon
from moorage_client.services import Services
from moorage_policies import catalog

PICTURE: Final = Path(__file__).parents[1] / "docs" / "pictures" / "first-lease.svg"
GPU: Final = {"modelName": "A100", "memory": 40_960}
GPUS: Final = {"count": 4, "gpus": [GPU] * 4}
NODES: Final = [
    {"id": name, "vcpus": {"count": 32}, "memory": 131_072, "gpus": GPUS}
    for name in ("node-1", "node-2")
]
COMMANDS: Final = (
    "moorage fleet",
    "moorage ask first_fit:1.0-stable --gpus 2 --ttl 600",
    "moorage leases",
    "moorage ask first_fit:1.0-stable --gpus 8 --ttl 600",
)
COLUMNS: Final = 100


def play() -> Iterator[tuple[str, str]]:
    """Yield each command and its output."""
    with tempfile.TemporaryDirectory() as state, daemon() as running:
        with Services(running.http) as services:
            services.put_cluster({"id": "lab", "nodes": {"nodeData": NODES}})
            services.publish_policy(catalog.document("first_fit"))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MOORAGE_URL": running.ws,
            "MOORAGE_HTTP_URL": running.http,
            "XDG_STATE_HOME": state,
            "COLUMNS": str(COLUMNS),
            "FORCE_COLOR": "1",
        }
        for command in COMMANDS:
            shown = subprocess.run(  # noqa: S603  # A command of `COMMANDS`.
                command.split(),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,  # The last request is refused.
            ).stdout
            lines = [line for line in shown.splitlines() if Text.from_ansi(line).plain.strip()]
            yield command, "\n".join(lines)


def record(picture: Path) -> None:
    """Run the commands, and write the picture."""
    console = Console(record=True, width=COLUMNS, file=Path(os.devnull).open("w"))  # noqa: SIM115  # Open until the program ends.
    for command, shown in play():
        console.print(Text("$ ", "bold green") + Text(command, "bold"))
        console.print(Text.from_ansi(shown))
    console.save_svg(str(picture), title="moorage")


if __name__ == "__main__":
    record(PICTURE)
