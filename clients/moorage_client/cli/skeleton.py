"""`moorage policy new`: creates a working policy with types, examples, tests and a README."""

import json
import re
from pathlib import Path
from typing import Annotated, Final

import typer

from moorage_client.cli.session import CommandSession

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

_FUNCTION: Final = '''"""{name}: say here what it prefers, and when to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moorage.policy import place

if TYPE_CHECKING:  # For your editor; not needed where the policy runs.
    from moorage.model import Demand
    from moorage.policy import FleetView
    from moorage_policies.types import Answer, PolicyInput


class AIOSv1PolicyRule:
    """Proposes the node with the highest score."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        self.settings = settings

    def eval(
        self, parameters: dict[str, Any], input_data: PolicyInput, context: dict[str, Any]
    ) -> Answer:
        """Return where the request goes, or why it goes nowhere."""

        def score(fleet: FleetView, demand: Demand) -> np.ndarray:
            """Return a number per node. Of those that the request fits on, the highest wins."""
            free = fleet.free_gpu_milli()
            return free if parameters.get("spread", True) else -free

        return place(input_data, score)
'''

_TESTS: Final = '''"""Try it as the server does: pytest, with moorage[server] installed."""

import json
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def report():
    command = ["moorage", "policy", "test", str(Path(__file__).parent), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=False).stdout)


def test_the_policy_is_sound(report):
    """It never proposes what is taken, and the same request gives the same answer."""
    assert report["passed"], report["findings"]


def test_it_grants_most_of_what_fits(report):
    assert report["outcomes"]["granted"] > sum(report["outcomes"].values()) / 2
'''

_README: Final = """# {name}

Say here what it prefers, and when to use it.

| Parameter | Default | What it does |
|---|---|---|
| `spread` | `true` | the emptiest node first; `false`: the fullest one |

In the folder that holds `{folder}`:

```console
$ moorage policy test {folder}
$ moorage policy push {folder} --uri {name}:1-stable
$ moorage policy activate {name}:1-stable
$ moorage ask {name} --gpus 1
```

`code/function.py` is the policy. `code/examples.json` holds requests that the server tries before
it takes a new version; add those that matter to you. `test_policy.py` runs with pytest.
"""

_EXAMPLES: Final = [
    {"name": "one GPU goes somewhere", "request": {"resources": {"gpus": 1}}},
    {
        "name": "the whole of a node",
        "request": {"resources": {"gpus": 4}},
        "output": {"gpus": ["0", "1", "2", "3"]},
    },
]


def new(
    session: CommandSession,
    name: Annotated[str, typer.Argument(help="Name of the policy, and of the folder to make")],
    directory: Annotated[
        Path, typer.Option(help="Where to make it", file_okay=False, exists=True)
    ] = Path(),
) -> None:
    """Create a folder with a working policy: code, types, examples, tests and a README."""
    if not NAME.fullmatch(name):
        raise typer.BadParameter(
            f"NAME: {name!r}; expected a letter, then letters, digits, - and _, 64 at most"
        )
    folder = directory / name
    described = {"policy_parameters": {"spread": True}, "description": f"{name}: what it prefers"}
    texts = {
        "code/function.py": _FUNCTION.replace("{name}", name),
        "code/examples.json": json.dumps(_EXAMPLES, indent=2) + "\n",
        "policy.json": json.dumps(described, indent=2) + "\n",
        "test_policy.py": _TESTS,
        "README.md": _README.format(name=name, folder=folder),
    }
    try:
        folder.mkdir()
        (folder / "code").mkdir()
        for path, text in texts.items():
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise typer.BadParameter(f"{folder} exists; choose another name, or --directory") from error
    except OSError as error:
        raise typer.BadParameter(f"cannot write {folder}: {error.strerror}") from error
    session.say(
        {"folder": str(folder), "files": [*texts]},
        f"{folder}: {', '.join(texts)}\nTry it: moorage policy test {folder}",
    )
