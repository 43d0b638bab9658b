"""Broken code of policies: archives, requirements and policies; `broken_uploads` has the rest."""

import base64
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from typing import Any

HTTP = "http://the-daemon"
URI = "broken:1-x"
HEAD = "class AIOSv1PolicyRule:\n"
INIT = "    def __init__(self, rule_id, settings, parameters): pass\n"
EVAL = "    def eval(self, parameters, input_data, context): return input_data['inputs']\n"
GOOD = HEAD + INIT + EVAL

Broken = dict[str, tuple[Any, str]]
"""What takes a second to make is a function that makes it: not all who look at these need it."""


def document(**more: Any) -> dict[str, Any]:
    """Return a document that is good but for what is given; None leaves a field out."""
    whole = {"policy_rule_uri": URI, "code": GOOD, **more}
    return {key: value for key, value in whole.items() if value is not None}


def coded(content: bytes | str) -> dict[str, Any]:
    """Return a document whose `code` is source text, or an archive in base64."""
    text = content if isinstance(content, str) else base64.b64encode(content).decode()
    return document(code=text)


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes | str], **options: Any) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as packed:
        for name, content in members:
            packed.writestr(name, content)
    return stream.getvalue()


def tarred(
    *members: tarfile.TarInfo | str, content: bytes = GOOD.encode(), mode: str = "gz"
) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{mode}") as packed:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            if info.isreg():
                info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def special(name: str, kind: bytes, to: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


def linked_zip() -> bytes:
    info = zipfile.ZipInfo("code/helper.py")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return zipped(("code/function.py", GOOD), (info, "/etc/passwd"))


def encrypted_zip() -> bytes:
    packed = bytearray(zipped(("code/function.py", GOOD)))
    packed[6] |= 1  # The flag of the member itself, and that of the directory at the end.
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    return bytes(packed)


def damaged_zip() -> bytes:
    packed = bytearray(zipped(("code/function.py", GOOD)))
    packed[packed.index(GOOD.encode()[:20]) + 3] ^= 0xFF  # The checksum then does not agree.
    return bytes(packed)


def files(**named: str) -> dict[str, Any]:
    """Return a document with an archive of these files beside a good function.py."""
    named = {"function_py": GOOD, **named}
    return coded(
        zipped(*((f"code/{name.replace('_', '.')}", text) for name, text in named.items()))
    )


def method(line: str) -> str:
    """Return a policy with one method in the place of a good one of its name."""
    name = line.split("(", maxsplit=1)[0].rsplit(maxsplit=1)[-1]
    rest = "".join(each for each in (INIT, EVAL) if f"def {name}(" not in each)
    return HEAD + rest + f"    {line}\n"


ARCHIVES: Broken = {
    "no function.py": (
        coded(zipped(("code/rule.py", GOOD), ("code/other.py", GOOD))),
        "no code/function.py among the files",
    ),
    "an empty archive": (coded(tarred()), "no code/function.py among the files (nothing)"),
    "a member outside": (
        coded(tarred("code/function.py", "../evil.py")),
        "has a member '../evil.py'",
    ),
    "a member at the root": (coded(tarred("/etc/cron.d/x")), "has a member '/etc/cron.d/x'"),
    "a backslash in a name": (
        coded(tarred("code\\function.py")),
        r"has a member 'code\\function.py'",
    ),
    "a drive in a name": (coded(tarred("C:/function.py")), "has a member 'C:/function.py'"),
    "a newline in a name": (coded(tarred("code/a\nb.py")), r"has a member 'code/a\nb.py'"),
    "a name without an end": (
        coded(tarred("code/" + "a" * 300)),
        "paths of at most 255 characters",
    ),
    "a member twice": (
        coded(tarred("code/function.py", "code/function.py")),
        "two members 'code/function.py'",
    ),
    "a member without a name": (coded(tarred(".", "code/function.py")), "has a member '.'"),
    "a file that is a folder": (
        coded(zipped(("code/function.py", GOOD), ("code/function.py/x.py", ""))),
        "'code/function.py' is a file and a folder",
    ),
    "a symbolic link": (
        coded(tarred(special("code/a.py", tarfile.SYMTYPE, "/etc/passwd"))),
        "the member 'code/a.py' is a link",
    ),
    "a hard link": (
        coded(tarred(special("code/b.py", tarfile.LNKTYPE, "/etc/passwd"))),
        "the member 'code/b.py' is a link",
    ),
    "a device": (
        coded(tarred(special("code/null", tarfile.CHRTYPE))),
        "'code/null' is a link, a dev",
    ),
    "a pipe": (
        coded(tarred(special("code/pipe", tarfile.FIFOTYPE))),
        "'code/pipe' is a link, a dev",
    ),
    "a symbolic link in a zip": (coded(linked_zip()), "the member 'code/helper.py' is a link"),
    "a password": (coded(encrypted_zip()), "is encrypted or packed in a rare way"),
    "a rare method": (
        coded(zipped(("code/rare.py", GOOD), compression=zipfile.ZIP_BZIP2)),
        "'code/rare.py' is encrypted or packed in a rare way",
    ),
    "too many files": (
        coded(zipped(*((f"code/{n}.py", "") for n in range(513)))),
        "the archive has more than 512 files; expected at most 512",
    ),
    "a bomb in a zip": (
        lambda: coded(
            zipped(("code/function.py", "\0" * (40 << 20)), compression=zipfile.ZIP_DEFLATED)
        ),
        "unpacks to more than 200 times its size",
    ),
    "half a zip": (
        coded(zipped(("code/function.py", GOOD))[:-40]),
        "the .zip is damaged: File is not a zip",
    ),
    "a zip with a wrong checksum": (coded(damaged_zip()), "Bad CRC-32 for file 'code/function.py'"),
    "half a tar.gz": (
        coded(tarred("code/function.py")[:-12]),
        "the .tar.gz is damaged: it ends before its end",
    ),
    "half a tar.xz": (
        coded(tarred("code/function.py", mode="xz")[:64]),
        "the .tar.xz is damaged: it ends before its end",
    ),
    "a gzip of no tar": (
        coded(gzip.compress(b"hello" * 400)),
        "the .tar.gz is damaged: invalid header",
    ),
    "an xz of no tar": (
        coded(lzma.compress(b"hello" * 400)),
        "the .tar.xz is damaged: invalid header",
    ),
    "an xz that wants a gigabyte": (
        lambda: coded(
            lzma.compress(GOOD.encode(), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
        ),
        "Memory usage limit exceeded",
    ),
}

POLICIES: Broken = {
    "a syntax error": (
        coded(GOOD + "x = (1,\n"),
        "line 4: SyntaxError: '(' was never closed\nx = (1,\n    ^",
    ),
    "a text without an end": (coded(GOOD + "x = 'a\n"), "unterminated string literal"),
    "an odd indentation": (coded(GOOD + "  x = 1\n"), "IndentationError"),
    "tabs and spaces": (coded("if 1:\n        a = 1\n\tb = 2\n"), "TabError"),
    "an unknown encoding": (coded("# coding: klingon\n" + GOOD), "unknown encoding: klingon"),
    "parentheses without an end": (
        coded("x = " + "(" * 5000 + "\n"),
        "too many nested parentheses",
    ),
    "a sibling that is broken": (
        files(helper_py="def f(:\n"),
        "code: helper.py, line 1: SyntaxError",
    ),
    "a sibling like a library": (
        files(json_py="x = 1\n"),
        "a library is called 'json' too; rename",
    ),
    "a part of a library": (
        coded("from json import nothing\n" + GOOD),
        "cannot import name 'nothing'",
    ),
    "no class": (coded("x = 1\n"), "function.py: there is no class AIOSv1PolicyRule"),
    "a function in the place of the class": (
        coded("def AIOSv1PolicyRule(): pass\n"),
        "it has a function of that name",
    ),
    "a class that hides itself": (
        coded(
            "class Hidden(type):\n    def __getattribute__(self, name): raise KeyError(name)\n"
            "class AIOSv1PolicyRule(metaclass=Hidden): pass\n"
        ),
        "line 2: KeyError: '__init__'",
    ),
    "an expression without an end": (coded("x = " + "-" * 100_000 + "1\n"), "MemoryError"),
    "no eval": (
        coded(HEAD + INIT),
        "AIOSv1PolicyRule has no eval(self, parameters, input_data, con",
    ),
    "no __init__": (coded(HEAD + EVAL), "AIOSv1PolicyRule has no __init__(self, rule_id, settings"),
    "an eval with too few parameters": (
        coded(method("def eval(self, parameters): pass")),
        "line 3: eval cannot be called as eval(self, parameters, input_data, context)",
    ),
    "an __init__ with too many": (
        coded(method("def __init__(self, a, b, c, d): pass")),
        "__init__ cannot be called as __init__(self, rule_id, settings, parameters)",
    ),
    "an eval that is async": (
        coded(method("async def eval(self, a, b, c): pass")),
        "eval must return its answer: write it without async and yield",
    ),
    "an import that raises": (
        coded("1 / 0\n" + GOOD),
        "line 1: ZeroDivisionError: division by zero",
    ),
    "a file that is opened": (coded("open('/etc/passwd')\n" + GOOD), "PermissionError"),
    "an import without an end": (coded("while True: pass\n" + GOOD), "did not load within"),
    "an import that ends the process": (
        coded("import os; os._exit(7)\n" + GOOD),
        "exited with status 7",
    ),
    "an import that takes all memory": (coded("x = 'x' * (1 << 40)\n" + GOOD), "MemoryError"),
    "an exit": (coded("raise SystemExit('enough')\n" + GOOD), "SystemExit: enough"),
    "a warning as an error": (
        coded("assert False, 'not today'\n" + GOOD),
        "AssertionError: not today",
    ),
}

WARNED: Broken = {
    "a library there is not": (
        files(requirements_txt="numpy\nrequests>=2\n"),
        "requirements.txt line 2: 'requests>=2' is not available to policies",
    ),
    "a requirement from elsewhere": (
        files(requirements_txt="git+https://example.org/x.git"),
        "requirements.txt line 1: 'git+https://example.org/x.git' is not available",
    ),
    "requirements in another file": (
        files(requirements_txt="-r more.txt"),
        "requirements.txt line 1: '-r more.txt' is not available",
    ),
    "requirements without an end": (
        files(requirements_txt="numpy\n" * 1001),
        "requirements.txt has more than 1000 lines",
    ),
    "a network library": (
        coded("import requests\n" + GOOD),
        "function.py line 1: 'requests' is not available to policies",
    ),
    "a management without data": (
        coded(GOOD + "    def management(self, action): pass\n"),
        "management cannot be called as management(self, action, data)",
    ),
    "a management that yields": (
        coded(GOOD + "    def management(self, a, b): yield\n"),
        "management must return its answer",
    ),
    "an __init__ that raises": (
        coded(method("def __init__(self, a, b, c): self.x = b['gone']")),
        "without settings.gone it cannot be constructed (KeyError: 'gone')",
    ),
}
"""What is no reason to refuse a policy: it is registered, and its author is told."""
