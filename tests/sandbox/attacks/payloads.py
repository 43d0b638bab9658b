"""Hostile policies by attack class (docs/reference/sandbox.md, "Attack classes").

Each payload is the body of `attack(rule, data, context, note)` in a real policy; it calls
`note("…")` for everything that succeeded and must not. `ends` lists the outcomes that are no
breach: `value` for a normal answer without a note, or a refusal code.
"""

from dataclasses import dataclass

PRELUDE = '''
import gc, io, json, os, random, re, sys, threading, time
from moorage.sandbox.wire import frames; from moorage.sandbox.cell import syscalls

MACHINE = syscalls.MACHINES[os.uname().machine]
NUMBERS = {**MACHINE.allowed, **MACHINE.deadly}

def attempt(note, name, function):
    """Note it when `function` does not raise."""
    try:
        result = function()
    except BaseException:
        return
    note(f"{name} -> {result!r}"[:200])

def dug_out():
    """Return what makes system calls as native code would: ctypes, from under the cell."""
    data = next(c for c in object.__subclasses__() if c.__name__ == "_CData")
    function = next(c for c in data.__subclasses__() if c.__name__ in ("CFuncPtr", "PyCFuncPtr"))
    simple = next(c for c in data.__subclasses__() if c.__name__ == "_SimpleCData")
    long = type("Long", (simple,), {"_type_": "l"})
    class Here:
        _handle = 0
    class Native(function):
        _flags_ = 1
        _restype_ = long
    found = Native(("syscall", Here()))
    def raw(number, *arguments):
        result = found(long(number), *[long(a) if isinstance(a, int) else a for a in arguments])
        result = getattr(result, "value", result)
        if result < 0:
            raise OSError(-result, "refused")
        return result
    return raw

def raw(number, *arguments):
    return dug_out()(number, *arguments)

def native(name, *arguments):
    return raw(NUMBERS[name], *arguments)

class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        self.settings = settings
    def eval(self, parameters, input_data, context):
        if input_data["inputs"].get("honest"):
            return {"honest": True}
        notes = []
        value = attack(self, input_data, context, notes.append)
        return {"breach": notes} if value is None else value
    def management(self, action, data):
        return {"action": action}

def attack(rule, data, context, note):
'''

DEAD = frozenset({"policy_crashed"})
VALUE = frozenset({"value"})
RAISED = frozenset({"value", "policy_error"})
STOPPED = frozenset({"policy_timeout"})
ANY = frozenset(
    {
        "value",
        "policy_error",
        "policy_timeout",
        "policy_crashed",
        "policy_memory",
        "policy_bad_output",
        "bad_policy",
    }
)


@dataclass(frozen=True)
class Payload:
    """An attack on the sandbox: its number, name and code, and the ends that are no breach."""

    number: int
    name: str
    body: str
    ends: frozenset[str] = VALUE

    @property
    def source(self) -> bytes:
        """Return the source of the policy."""
        lines = "\n".join(f"    {line}" for line in self.body.strip("\n").splitlines())
        return (PRELUDE + lines + "\n").encode()


def deadly(number: int, name: str, arguments: str = "0, 0, 0, 0, 0") -> Payload:
    body = f'native("{name}", {arguments}); note("{name} returned")'
    return Payload(number, name, body, DEAD)


def bad_answer(number: int, name: str, expression: str, ends: frozenset[str] = ANY) -> Payload:
    return Payload(number, name, f"return {expression}", ends)


# On a busy machine, a large answer may reach its deadline before its limit.
OUTPUT = frozenset({"policy_bad_output", "policy_timeout"})
FLOOD = ANY - {"value"}
