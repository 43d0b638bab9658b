"""A cell has preloaded all modules that a policy's imports load at first use."""

import json
import subprocess
import sys
from pathlib import Path

import moorage
from moorage.sandbox.host.zygote import ISOLATED

PROGRAM = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from moorage.sandbox.cell.preload import preload
preload()
ready = dict(sys.modules)
import ast, importlib.util

def wanted(module):
    file = getattr(module, "__file__", None) or ""
    if not file.endswith(".py"):
        return
    with open(file, "rb") as source:
        functions = [
            node for node in ast.walk(ast.parse(source.read()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from ((each.name, function.name) for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(base, module.__spec__.parent)
                yield base, function.name
                yield from ((f"{base}.{each.name}", function.name) for each in node.names)

def exists(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False

found = {}
for name, module in ready.items():
    if name.partition(".")[0] in {*sys.stdlib_module_names, "msgspec", "numpy"}:
        for each, function in wanted(module):
            if each not in ready and exists(each):
                found.setdefault(each, []).append(f"{name}.{function}")
print(json.dumps(found))
"""
NEVER = {
    "a network": {"email", "http.client", "smtplib", "urllib.error", "urllib.request"},
    "files": {
        *("bz2", "grp", "gzip", "importlib.metadata", "importlib.readers", "lzma", "pwd"),
        *("shutil", "tempfile", "zipfile"),
    },
    "other processes": {"subprocess"},
    "a person": {"_pyrepl", "getopt", "pydoc", "readline", "rlcompleter"},
    "another platform": {"_ios_support", "encodings.mbcs", "plistlib"},
    "tests and builds": {
        *("doctest", "numpy.core", "numpy.ctypeslib", "numpy.distutils", "numpy.f2py"),
        *("numpy.matlib", "numpy.testing", "pytest"),
    },
    "what is not installed": {"attrs", "yaml"},
    "where memory was allocated, if that is known": {"tracemalloc"},
}
"""Modules that no cell may have, by subject."""


def test_the_zygote_preloads_modules_that_are_imported_at_first_use():
    path = [each for each in sys.path if each.endswith("site-packages")]
    path.insert(0, str(Path(moorage.__file__).parents[1]))
    command = [sys.executable, *ISOLATED, "-c", PROGRAM, json.dumps(path)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    without = {name for names in NEVER.values() for name in names}
    missing = {
        name: by
        for name, by in found.items()
        if not any(name == each or name.startswith(f"{each}.") for each in without)
    }
    assert missing == {}, json.dumps(missing)
