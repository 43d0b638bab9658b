"""Makes a new backend: `python tools/add_backend.py NAME` writes its folder, tests, extra and page.

The new code runs at once. The backend refuses each start with a sentence that names the file to
write. The tests in `tests/conformance` test the backend, and may fail until you remove `UNFINISHED`
from its bench. docs/contributing/a-backend.md has the next steps.
"""

import keyword
import re
import sys
from pathlib import Path
from string import Template
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = "server/moorage/backends/$name"
TESTS: Final = "tests/backends/$name"

FILES: Final = {
    f"{SOURCE}/__init__.py": '''\
"""The backend `$name`."""
''',
    f"{SOURCE}/kind.py": '''\
"""The kind `$name`, for the registry."""

from typing import TYPE_CHECKING, Final

from moorage.backends.registry import BackendKind, NoSettings, Surroundings

if TYPE_CHECKING:
    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec


class ${Name}Kind(BackendKind[NoSettings]):
    """Starts workloads at $name."""

    name = "$name"
    about = "`$name` starts nothing yet."
    does = "starts nothing yet"
    settings = NoSettings
    extra = "$name"

    def open(self, settings: NoSettings, surroundings: Surroundings) -> "Backend":
        """Open the backend; see `BackendKind.open`."""
        from moorage.backends.$name import backend  # noqa: PLC0415  # See registry.

        del settings, surroundings  # Not used yet.
        return backend.${Name}Backend()

    def specs(self) -> "tuple[type[BaseResourceSpec], ...]":
        """Return the spec of the backend; see `BackendKind.specs`."""
        from moorage.backends.$name import specs  # noqa: PLC0415  # See registry.

        return (specs.${Name}ResourceSpec,)


KIND: Final = ${Name}Kind()
''',
    f"{SOURCE}/specs.py": '''\
"""The spec of the backend `$name`."""

from dataclasses import dataclass

from moorage.backends.spec_fields import Name
from moorage.backends.specs import BaseResourceSpec


@dataclass(kw_only=True)
class ${Name}ResourceSpec(BaseResourceSpec):
    """A workload of $name.

    Args:
        image: The image of the workload.
    """

    category: str = "$name"

    image: Name = "default"
''',
    f"{SOURCE}/backend.py": '''\
"""The backend `$name`. It starts nothing yet."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from moorage.backends.base import (
    BackendError,
    CommandExecution,
    Listener,
    Log,
    Order,
    Support,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.specs import BaseResourceSpec

CATEGORIES: Final = frozenset({"$name"})


class ${Name}Backend:
    """Workloads at $name."""

    name: Final = "$name"
    support: Final = Support(categories=CATEGORIES, default="$name")

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def listen(self, listener: Listener | None) -> None:
        """Report every change to `listener`; see `Backend.listen`."""
        self._listener = listener

    def refuse(self, spec: BaseResourceSpec) -> None:
        """Refuse specs of other categories; see `Backend.refuse`."""
        if spec.category not in CATEGORIES:
            raise UnsupportedSpecError(f"the backend {self.name} starts no {spec.category}")

    async def discover(self) -> Collection[WorkloadReport]:
        """Return no workloads: nothing is started yet; see `Backend.discover`."""
        return []

    async def start(self, order: Order) -> WorkloadReport:
        """Refuse: nothing is started yet; see `Backend.start`."""
        self.refuse(order.spec)
        raise BackendError(f"the backend {self.name} starts nothing yet: write {__name__}")

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Do nothing: nothing is started yet; see `Backend.stop`."""

    async def status(self, workload: str) -> WorkloadReport:
        """Raise an error: there are no workloads yet; see `Backend.status`."""
        raise UnknownWorkloadError(workload)

    async def probe(self, workload: str) -> WorkloadReport:
        """Check a workload; see `Backend.probe`."""
        return await self.status(workload)

    def glance(self, workload: str) -> WorkloadReport | None:
        """Return None: unknown; see `Backend.glance`."""
        del workload
        return None

    async def control(self, workload: str, limits: Mapping[str, Any]) -> None:
        """Refuse: no limit can be changed; see `Backend.control`."""
        await self.status(workload)
        if limits:
            names = ", ".join(sorted(limits))
            raise UnsupportedSpecError(f"the backend {self.name} has no limit named {names}")

    async def reset(self, workload: str) -> Any:
        """Refuse: no workload can be reset; see `Backend.reset`."""
        await self.status(workload)
        raise UnsupportedSpecError(f"the backend {self.name} resets nothing")

    async def execute(
        self,
        workload: str,
        command: Sequence[str],  # noqa: ARG002  # `Backend` has it.
        *,
        timeout_seconds: float | None = None,  # noqa: ARG002  # `Backend` has it.
        workdir: str | None = None,  # noqa: ARG002  # `Backend` has it.
        user: str | None = None,  # noqa: ARG002  # `Backend` has it.
        environment: Mapping[str, str] | None = None,  # noqa: ARG002  # `Backend` has it.
    ) -> CommandExecution:
        """Refuse: no command can be run inside; see `Backend.execute`."""
        await self.status(workload)
        raise UnsupportedSpecError(f"the backend {self.name} runs no commands")

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        """Refuse: there is no output yet; see `Backend.logs`."""
        del offset, attempt
        await self.status(workload)
        raise UnsupportedSpecError(f"the backend {self.name} has no output of workloads")

    async def close(self) -> None:
        """Close the backend; see `Backend.close`."""
        self._listener = None
''',
    f"{TESTS}/bench.py": '''\
"""The bench of the backend `$name` for `tests/conformance`; see `Bench` there."""

from pathlib import Path
from typing import Any

import pytest

from moorage.backends.$name.backend import ${Name}Backend
from moorage.backends.$name.specs import ${Name}ResourceSpec

UNFINISHED = True  # Remove it when the backend starts workloads: then each test must pass.


class ${Name}Bench:
    def backend(self) -> ${Name}Backend:
        return ${Name}Backend()

    def spec(self) -> ${Name}ResourceSpec:
        return ${Name}ResourceSpec()

    def slow(self) -> ${Name}ResourceSpec:
        return ${Name}ResourceSpec(image="slow")

    def failing(self) -> tuple[${Name}ResourceSpec, str]:
        return ${Name}ResourceSpec(image="failing"), "a text of the reason"

    def dying(self) -> tuple[${Name}ResourceSpec, int]:
        return ${Name}ResourceSpec(image="dying"), 3

    def limits(self) -> dict[str, Any]:
        return {}

    def gang(self) -> None:
        return None

    def writing(self) -> None:
        return None

    async def left(self) -> int:
        return 0


def bench(request: pytest.FixtureRequest, tmp_path: Path) -> ${Name}Bench:
    """Return the bench; `request.getfixturevalue` starts services that it needs."""
    return ${Name}Bench()
''',
    f"{TESTS}/test_backend.py": '''\
"""Tests of the backend `$name`, besides those in `tests/conformance`."""

import pytest

from moorage.backends import base
from moorage.backends.$name.backend import ${Name}Backend
from moorage.backends.$name.specs import ${Name}ResourceSpec


async def test_start_says_what_is_to_be_written() -> None:
    with pytest.raises(base.BackendError, match="the backend $name starts nothing yet"):
        await ${Name}Backend().start(base.Order("a", ${Name}ResourceSpec()))
''',
    "docs/how-to/$name.md": """\
# Start workloads at $name

With `pip install '.[$name]'` in a checkout, the setting `backends` can name `$name`. The backend
starts nothing yet: it refuses each request with a `provision` that names it.

## What can go wrong

- **Each request is refused:** the backend is not written yet.
""",
}


def main() -> None:
    """Write a backend, or report why that is impossible."""
    if len(sys.argv) != 2 or not re.fullmatch(r"[a-z][a-z0-9_]*", sys.argv[1]):  # noqa: PLR2004  # A name.
        raise SystemExit("usage: python tools/add_backend.py NAME, of small letters and digits")
    name = sys.argv[1]
    title = "".join(part.capitalize() for part in name.split("_"))
    files = {
        ROOT / Template(place).substitute(name=name): Template(text).substitute(
            name=name, Name=title
        )
        for place, text in FILES.items()
    }
    there = [str(file.relative_to(ROOT)) for file in files if file.exists()]
    if there or keyword.iskeyword(name):
        raise SystemExit(f"{name} is taken: {', '.join(there) or 'a word of Python'}")
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    project = ROOT / "pyproject.toml"
    extra = f"{name} = [] # The backend `{name}`.\n"
    head, mark, tail = project.read_text(encoding="utf-8").partition("[project.scripts]\n")
    project.write_text(head.rstrip("\n") + f"\n{extra}\n{mark}{tail}", encoding="utf-8")
    for file in (*files, project):
        print(file.relative_to(ROOT))  # noqa: T201  # The output of this program.


if __name__ == "__main__":
    main()
