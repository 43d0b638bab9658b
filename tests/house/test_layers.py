"""Imports go only to lower layers and not to siblings; each contract catches a violation."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
PLACES = ("server", "policies", "clients")

LAYERS = "Layers import downwards, and siblings do not meet"
CORE = "Inside the core, imports go down from the life cycle to the state"
PURE = "Pure packages do no I/O, read no clock, draw no chance and write no log"
SLOTS = "The slot pool asks the machine for its size and takes a lock, and nothing more"
DATABASE = "Only the storage knows a database"
WIRE = "The core knows no wire"
MODEL = "The model needs the standard library and msgspec only"
LIBRARY = "The daemon does without the libraries"
SLICES = "Slices know nothing of the daemon and its packages"
CELL = "A cell knows neither the event loop nor the host"
CLIENTS = "Clients enter by the protocol"
SHIPPED = "What is shipped does without the benchmarks"
POLICIES = "Shipped policies enter by the policy package"
OUTSIDE = "Below layer 6 the server knows neither clients nor shipped policies"

MUTANTS = [
    ("server/moorage/core/state/facts.py", "import moorage.protocol", WIRE),
    ("server/moorage/core/state/facts.py", "import moorage.ledger", LAYERS),
    ("server/moorage/model.py", "import moorage.policy", LAYERS),
    ("server/moorage/policy/proposal.py", "import moorage.protocol", LAYERS),
    ("server/moorage/gateway/__init__.py", "import moorage.ledger", LAYERS),
    ("server/moorage/sandbox/__init__.py", "import moorage.config", LAYERS),
    ("server/moorage/config/__init__.py", "import moorage.daemon", LAYERS),
    ("server/moorage/backends/__init__.py", "import moorage.resources", LAYERS),
    ("server/moorage/lab/__init__.py", "import moorage.testing", LAYERS),
    ("server/moorage/testing/__init__.py", "import moorage.bench", LAYERS),
    ("server/moorage/bench/__init__.py", "import benchmarks", SHIPPED),
    ("server/moorage/utils.py", "", LAYERS),
    ("server/moorage/core/lifecycle/__init__.py", "import moorage.core.allocator", CORE),
    ("server/moorage/core/reports/__init__.py", "import moorage.core.lifecycle.leases", CORE),
    ("server/moorage/core/queue/__init__.py", "import moorage.core.reports.explain", CORE),
    ("server/moorage/core/fit/__init__.py", "import moorage.core.queue.order", CORE),
    ("server/moorage/core/turns/__init__.py", "import moorage.core.fit.feasibility", CORE),
    ("server/moorage/core/state/__init__.py", "import moorage.core.turns.events", CORE),
    ("server/moorage/core/utils.py", "", CORE),
    ("server/moorage/core/state/facts.py", "import asyncio", PURE),
    ("server/moorage/core/state/facts.py", "from time import time", PURE),
    ("server/moorage/policy/fleet.py", "import random", PURE),
    ("server/moorage/model.py", "import logging", PURE),
    ("server/moorage/slots/pool.py", "import time", SLOTS),
    ("server/moorage/slots/pool.py", "import moorage.query", LAYERS),
    ("server/moorage/slots/pool.py", "import moorage_client", OUTSIDE),
    ("server/moorage/model.py", "import numpy", MODEL),
    ("server/moorage/ledger/stored.py", "import sqlite3", DATABASE),
    ("server/moorage/catalog/embedded/store.py", "import psycopg", DATABASE),
    ("server/moorage/storage/base.py", "import moorage.protocol", LAYERS),
    ("server/moorage/storage/base.py", "import moorage.ledger", LAYERS),
    ("server/moorage/daemon/__init__.py", "import moorage.resources", LIBRARY),
    ("server/moorage/daemon/__init__.py", "import moorage.slices", LIBRARY),
    ("server/moorage/slices/__init__.py", "import moorage.resources", LAYERS),
    ("server/moorage/slices/__init__.py", "import moorage.backends", SLICES),
    ("server/moorage/slices/__init__.py", "import moorage_client", OUTSIDE),
    ("server/moorage/sandbox/cell/worker.py", "import asyncio", CELL),
    ("server/moorage/sandbox/cell/worker.py", "import moorage.core.state.facts", CELL),
    ("server/moorage/sandbox/cell/worker.py", "import moorage.sandbox.host.sandbox", CELL),
    ("server/moorage/sandbox/wire/frames.py", "import moorage.sandbox.host.work", CELL),
    ("clients/moorage_client/__init__.py", "import moorage.core.state.facts", CLIENTS),
    ("clients/moorage_client/__init__.py", "import moorage_policies", CLIENTS),
    ("clients/moorage_client/__init__.py", "import moorage.pool_server", CLIENTS),
    ("policies/moorage_policies/__init__.py", "import moorage.protocol", POLICIES),
    ("policies/moorage_policies/__init__.py", "import moorage_client", POLICIES),
    ("policies/moorage_policies/__init__.py", "import moorage.slots", POLICIES),
    ("server/moorage/daemon/__init__.py", "import moorage_client", OUTSIDE),
    ("server/moorage/web/__init__.py", "import moorage_policies", OUTSIDE),
]


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the packages in `tree`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / p) for p in PLACES)}
    command = [LINT_IMPORTS, "--no-cache", "--config", tree / "pyproject.toml"]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="module")
def copy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for place in PLACES:
        shutil.copytree(root / place, tree / place, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tree)
    return tree


def test_no_import_breaks_a_contract(copy: Path) -> None:
    report = lint(copy)
    assert report.returncode == 0, report.stdout
    assert f"{LAYERS} KEPT" in " ".join(report.stdout.split())


def named(name: str, line: str) -> str:
    """Return the module and the import that a report names for a mutant."""
    module = name.partition("/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{module} -> {line.split()[1]}" if line else module


def test_forbidden_imports_break_the_contract_about_them(copy: Path) -> None:
    """The test makes all violations at once, and the report lists each under its contract."""
    before = {}
    for name, line, _ in MUTANTS:
        path = copy / name
        before.setdefault(path, path.read_text() if path.exists() else None)
        with path.open("a") as file:
            file.write(f"\n{line}\n")
    try:
        report = lint(copy)
    finally:
        for path, text in before.items():
            path.unlink() if text is None else path.write_text(text)
    said = report.stdout.partition("\nBroken contracts\n")[2]
    parts = re.split(r"\n(.+)\n-+\n", said)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [x for x in MUTANTS if named(*x[:2]) not in found.get(x[2], "")] == []
