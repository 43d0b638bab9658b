"""Broken policies, each in a way of its own, by what the answer says of it.

`BROKEN` maps a piece of the one sentence that the answer must have to a PolicyRule document (or the
bytes of a request's body). `WARNED` has what is registered all the same. `HTTP` stands for the
daemon's own HTTP address.
"""

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
FILE = "code/function.py"

Broken = dict[str, Any]
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


def special(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def linked_zip() -> bytes:
    info = zipfile.ZipInfo("code/helper.py")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return zipped((FILE, GOOD), (info, "/etc/passwd"))


def encrypted_zip() -> bytes:
    packed = bytearray(zipped((FILE, GOOD)))
    packed[6] |= 1  # The flag of the member itself, and that of the directory at the end.
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    return bytes(packed)


def damaged_zip() -> bytes:
    packed = bytearray(zipped((FILE, GOOD)))
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


def exampled(*examples: Any, **more: Any) -> dict[str, Any]:
    return document(metadata={"examples": list(examples)}, **more)


def schema(entry: Any, field: str = "policy_input_schema") -> dict[str, Any]:
    return document(**{field: {"size": entry}})


def commands(*each: Any) -> dict[str, Any]:
    return document(management_commands_schema=list(each))


ONE = {"request": {"inputs": {"cluster_id": "lab"}}}
BROKEN: Broken = {
    # Documents.
    "JSON": b"{",
    "body: expected a JSON object": b"[]",
    "can't decode byte 0xff": b'{"code": "\xff"}',
    "Missing required fields: name, version, release_tag (or": document(policy_rule_uri=None),
    "fields: release_tag (or": document(policy_rule_uri=None, name="a", version="1"),
    "policy_rule_uri: expected `<name>:": document(policy_rule_uri="broken:1"),
    "name: expected broken, as in policy_": document(name="whole"),
    "version: expected 1, as in policy_rule_uri broken:1-x": document(version="2"),
    "release_tag: expected x, as in policy_rule_uri": document(release_tag="y"),
    "name: expected a text": document(name=7),
    "version: expected a text": document(version=1),
    "release_tag: expected a text": document(release_tag=[]),
    "code: expected source text, an archive in base64": document(code=None),
    "metadata: expected an object": document(metadata=[]),
    "tags: expected a text with commas, or a list": document(tags=7),
    "code_type: expected a text": document(code_type=7),
    "type: expected `policy` or `python_class_v1`": document(type=7),
    "description: expected a text": document(description=[]),
    "policy_settings: expected an object": document(policy_settings=[]),
    "policy_parameters: expected an object": document(policy_parameters="x"),
    "functionality_data: expected an object": document(functionality_data=[]),
    "resource_estimates: expected an obj": document(resource_estimates=7),
    "whole numbers of at most 64 bits": document(policy_parameters={"size": 10**30}),
    "at most 16777216": document(metadata={"pad": "x" * (17 << 20)}),
    # Where the code comes from.
    "has no `policy_code_root` from which paths are read": document(code="rules/function.py"),
    "127.0.0.1 is not public": document(code=f"{HTTP}/openapi.json"),
    "169.254.169.254 is not public": document(code="http://169.254.169.254/latest"),
    "has no host: ": document(code="http://xn--a.example./x"),
    "the data: URL has no comma": document(code="data:text/plain"),
    "the base64 text is damaged": document(code="data:;base64,%%%"),
    "neither UTF-8 text nor a known": document(code="data:;base64,gIGC"),
    "it is empty or holds NUL characters": document(code=f"{GOOD}\0"),
    "more than 8388608 bytes": document(code="#" * (9 << 20) + "\n"),
    # Archives.
    "no code/function.py among the files (": coded(zipped(("a.py", GOOD), ("b.py", GOOD))),
    "no code/function.py among the files (nothing)": coded(tarred()),
    "has a member '../evil.py'": coded(tarred(FILE, "../evil.py")),
    "has a member '/etc/cron.d/x'": coded(tarred("/etc/cron.d/x")),
    r"has a member 'code\\function.py'": coded(tarred("code\\function.py")),
    "has a member 'C:/function.py'": coded(tarred("C:/function.py")),
    r"has a member 'code/a\nb.py'": coded(tarred("code/a\nb.py")),
    "paths of at most 255 characters": coded(tarred("code/" + "a" * 300)),
    "two members 'code/function.py'": coded(tarred(FILE, FILE)),
    "has a member '.'": coded(tarred(".", FILE)),
    "function.py' is a file and a folder": coded(zipped((FILE, GOOD), (FILE + "/x.py", ""))),
    "the member 'code/a.py' is a link": coded(tarred(special("code/a.py", tarfile.SYMTYPE))),
    "the member 'code/b.py' is a link": coded(tarred(special("code/b.py", tarfile.LNKTYPE))),
    "'code/null' is a link, a dev": coded(tarred(special("code/null", tarfile.CHRTYPE))),
    "'code/pipe' is a link, a dev": coded(tarred(special("code/pipe", tarfile.FIFOTYPE))),
    "the member 'code/helper.py' is a link": coded(linked_zip()),
    "is encrypted or packed in a rare way": coded(encrypted_zip()),
    "rare.py' is encrypted": coded(zipped(("code/rare.py", ""), compression=zipfile.ZIP_BZIP2)),
    "has more than 512 files": coded(zipped(*((f"code/{n}.py", "") for n in range(513)))),
    "unpacks to more than 200 times its size": lambda: coded(
        zipped((FILE, "\0" * (40 << 20)), compression=zipfile.ZIP_DEFLATED)
    ),
    "the .zip is damaged: File is not a zip": coded(zipped((FILE, GOOD))[:-40]),
    "Bad CRC-32 for file 'code/function.py'": coded(damaged_zip()),
    "the .tar.gz is damaged: it ends before its end": coded(tarred(FILE)[:-12]),
    "the .tar.xz is damaged: it ends": coded(tarred(FILE, mode="xz")[:64]),
    "the .tar.gz is damaged: invalid header": coded(gzip.compress(b"hello" * 400)),
    "the .tar.xz is damaged: invalid header": coded(lzma.compress(b"hello" * 400)),
    "Memory usage limit exceeded": lambda: coded(
        lzma.compress(GOOD.encode(), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
    ),
    # Code.
    "line 4: SyntaxError: '(' was never closed\nx = (1,\n    ^": coded(GOOD + "x = (1,\n"),
    "unterminated string literal": coded(GOOD + "x = 'a\n"),
    "IndentationError": coded(GOOD + "  x = 1\n"),
    "TabError": coded("if 1:\n        a = 1\n\tb = 2\n"),
    "unknown encoding: klingon": coded("# coding: klingon\n" + GOOD),
    "too many nested parentheses": coded("x = " + "(" * 5000 + "\n"),
    "code: helper.py, line 1: SyntaxError": files(helper_py="def f(:\n"),
    "a library is called 'json' too; rename": files(json_py="x = 1\n"),
    "cannot import name 'nothing'": coded("from json import nothing\n" + GOOD),
    "function.py: there is no class AIOSv1PolicyRule": coded("x = 1\n"),
    "it has a function of that name": coded("def AIOSv1PolicyRule(): pass\n"),
    "line 2: KeyError: '__init__'": coded(
        "class Hidden(type):\n    def __getattribute__(self, name): raise KeyError(name)\n"
        "class AIOSv1PolicyRule(metaclass=Hidden): pass\n"
    ),
    "MemoryError": coded("x = " + "-" * 100_000 + "1\n"),
    "AIOSv1PolicyRule has no eval(self, parameters, input_data, con": coded(HEAD + INIT),
    "AIOSv1PolicyRule has no __init__(self, rule_id, settings": coded(HEAD + EVAL),
    "line 3: eval cannot be called as eval(": coded(method("def eval(self, parameters): pass")),
    "__init__ cannot be called as": coded(method("def __init__(self, a, b, c, d): pass")),
    "eval must return its answer: write it": coded(method("async def eval(self, a, b, c): pass")),
    "line 1: ZeroDivisionError: division by zero": coded("1 / 0\n" + GOOD),
    "PermissionError": coded("open('/etc/passwd')\n" + GOOD),
    "did not load within": coded("while True: pass\n" + GOOD),
    "exited with status 7": coded("import os; os._exit(7)\n" + GOOD),
    "line 1: MemoryError": coded("x = 'x' * (1 << 40)\n" + GOOD),
    "SystemExit: enough": coded("raise SystemExit('enough')\n" + GOOD),
    "AssertionError: not today": coded("assert False, 'not today'\n" + GOOD),
    # Examples.
    "metadata.examples: expected a list of examples": document(metadata={"examples": {}}),
    "expected either `request` or `input_data`; found nei": exampled({}),
    "resources.gpus: expected a whole": exampled({"request": {"resources": {"gpus": "two"}}}),
    "metadata.examples[0].request.lease: expected one of": exampled({"request": {"lease": {}}}),
    "examples[0].fleet[0]: id: expected 1 to 253": exampled({**ONE, "fleet": [{"nodes": 7}]}),
    "a cluster that is live": exampled({**ONE, "fleet": [{"id": "lab", "status": "off"}]}),
    'to be "lob"; it is "lab"': exampled({**ONE, "output": {"cluster_id": "lob"}}),
    "“nowhere” is none": exampled({"request": {"inputs": {"cluster_id": "nowhere"}}}),
    "output.node_id: expected a text; it is missing": exampled(
        ONE, policy_output_schema={"node_id": {"type": "string", "required": True}}
    ),
    "list indices must be integers or slices, not str": exampled({"input_data": []}),
    "examples.json: expected a list of": files(examples_json="["),
}

SIZE, TEXT = {"type": "number"}, {"type": "string"}
WARNED: Broken = {
    "line 2: 'requests>=2' is not available": files(requirements_txt="numpy\nrequests>=2\n"),
    "x.git' is not available": files(requirements_txt="git+https://example.org/x.git"),
    "line 1: '-r more.txt' is not available": files(requirements_txt="-r more.txt"),
    "requirements.txt has more than 1000 lines": files(requirements_txt="numpy\n" * 1001),
    "line 1: 'requests' is not available to": coded("import requests\n" + GOOD),
    "management cannot be called": coded(GOOD + "    def management(self, action): pass\n"),
    "management must return its answer": coded(GOOD + "    def management(self, a, b): yield\n"),
    "(KeyError: 'gone')": coded(method("def __init__(self, a, b, c): self.x = b['gone']")),
    # Schemas.
    "policy_input_schema: expected an object with one entry": document(policy_input_schema="x"),
    "policy_output_schema: expected an object with one entry": document(policy_output_schema=[]),
    "expected object, or array with items": document(policy_input_schema={"type": "string"}),
    "oneOf: expected a constraint": document(policy_input_schema={"type": "object", "oneOf": []}),
    "policy_input_schema.size: expected an object that": schema("number"),
    "policy_input_schema.size.type: expected one of string": schema({}),
    '"int", which is `integer` here': schema({"type": "int"}),
    "known here; did you mean `min`?": schema({**SIZE, "mim": 1}),
    "no `pattern` where the type is num": schema({**SIZE, "pattern": "x"}),
    "size.pattern: expected": schema({**TEXT, "pattern": "a{"}),
    "pattern: expected characters": schema({**TEXT, "pattern": "(?=x)"}, "policy_settings_schema"),
    "it takes too much work to follow": schema({**TEXT, "pattern": "(a|b)*a(a|b){20}$"}),
    "size.min: expected at most `": schema({**SIZE, "min": 2, "max": 1}),
    "size.choices: expected a list of 1 to 1000": schema({**SIZE, "choices": []}),
    "size.length: expected a whole": schema({"type": "array", "length": -1}),
    "size.default: expected a number of at least 1": schema({**SIZE, "min": 1, "default": 0}),
    "expected true or false, or a list of names": schema({"type": "object", "required": [7]}),
    "no `properties` where the type": schema({**SIZE, "properties": {}}),
    'policy_parameters.size: expected a number; found "x"': document(
        policy_parameters_schema={"size": SIZE}, policy_parameters={"size": "x"}
    ),
    "policy_settings.zone: expected true or false; found 1": document(
        policy_settings_schema={"zone": {"type": "boolean"}}, policy_settings={"zone": 1}
    ),
    "management_commands_schema[0].name: expected a text": commands({"description": "x"}),
    "expected a text that no other command has": commands({"name": "a"}, {"name": "a"}),
    "management_commands_schema[0]: expected an obj": commands("reset"),
    "expected a list of at most 100": document(management_commands_schema="reset"),
}
"""What is no reason to refuse a policy: it is registered, and its author is warned."""
