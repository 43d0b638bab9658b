"""The seccomp filter, run in a small BPF interpreter, gives equal verdicts on two architectures."""

import functools
import struct

import pytest

from moorage.sandbox.cell.syscalls import MACHINES, Machine, assemble

ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def verdict(machine: Machine, number: int, *arguments: int, audit: int | None = None) -> int:
    words = [number, machine.audit if audit is None else audit, 0, 0]
    for argument in (*arguments, 0, 0, 0, 0, 0, 0)[:6]:
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    code = instructions(machine.audit)
    at, loaded = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x20:
            loaded = words[value // 4]
        elif operation == 0x06:
            return value
        else:
            test = {
                0x15: loaded == value,
                0x35: loaded >= value,
                0x25: loaded > value,
                0x45: bool(loaded & value),
            }[operation]
            at += if_true if test else if_false


@functools.cache
def instructions(audit: int) -> list[tuple[int, int, int, int]]:
    machine = next(machine for machine in MACHINES.values() if machine.audit == audit)
    return list(struct.iter_unpack("<HBBI", assemble(machine)))


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_every_system_call_is_allowed_refused_or_fatal_as_documented(machine):
    special = {*machine.on_channel.values(), machine.mapping, machine.protecting}
    for number in range(600):
        if number in special:
            continue
        expected = EPERM
        if number in machine.allowed.values():
            expected = ALLOW
        elif number in machine.deadly.values():
            expected = KILL
        assert verdict(machine, number) == expected, number
    assert not set(machine.allowed.values()) & set(machine.deadly.values())
    assert not special & {*machine.allowed.values(), *machine.deadly.values()}
    assert len(instructions(machine.audit)) <= 4096


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_arguments_of_system_calls_are_checked(machine):
    for number in machine.on_channel.values():
        assert [verdict(machine, number, fd) for fd in (0, 3, 4, 99)] == [ALLOW] * 2 + [EPERM] * 2
        assert verdict(machine, number, 0xFFFFFFFF) == EPERM
    for protection, expected in [(0, ALLOW), (3, ALLOW), (4, EPERM), (5, EPERM), (7, EPERM)]:
        assert verdict(machine, machine.mapping, 0, 4096, protection, 0x22) == expected
        assert verdict(machine, machine.protecting, 0, 4096, protection) == expected
    assert verdict(machine, machine.mapping, 0, 4096, 3, 0x40022) == EPERM
    for name in ("clock_gettime", "clock_getres", "clock_nanosleep"):
        number = machine.allowed[name]
        # The CPU clock of process 1, as an int and sign-extended.
        others = ((~1 << 3) | 2) & 0xFFFFFFFF, (~1 << 3) | 2
        assert [verdict(machine, number, clock) for clock in (0, 1, 11)] == [ALLOW] * 3
        assert [verdict(machine, number, clock) for clock in others] == [EPERM] * 2
    affinity = machine.allowed["sched_getaffinity"]
    assert [verdict(machine, affinity, pid) for pid in (0, 1, 4000)] == [ALLOW, EPERM, EPERM]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_a_system_call_of_another_abi_kills_the_process(machine):
    for audit in (0, 0x40000003, 0xC000003E, 0xC00000B7):
        if audit != machine.audit:
            assert verdict(machine, 0, audit=audit) == KILL
    if machine.x32:
        assert verdict(machine, 0x40000000) == KILL
        assert verdict(machine, 0x40000000 + 39) == KILL
        assert verdict(machine, 0xFFFFFFFF) == KILL


def test_the_filters_of_both_architectures_forbid_the_same_calls():
    x86, arm = MACHINES["x86_64"], MACHINES["aarch64"]
    only_x86 = {"modify_ldt", "arch_prctl", "set_thread_area", "ioperm", "iopl"}
    assert set(x86.deadly) - set(arm.deadly) == only_x86
    assert set(arm.deadly) <= set(x86.deadly)
    assert set(x86.allowed) - set(arm.allowed) == {"time"}
