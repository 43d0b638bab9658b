"""Reads marks that distinguish the data folder of this machine's agent from a copy of the folder.

`agent_program` sends the marks in each hello; the server compares them with those of the last
hello.
"""

import contextlib
import ctypes
import os
import struct
from pathlib import Path
from typing import Final

from moorage.backends.agents.wire import ADDRESSES_MAX, AgentFolder

_INTERFACES: Final = Path("/sys/class/net")
_OWN_ADDRESS: Final = {"type": "1", "addr_assign_type": "0"}
"""Files of a network interface, with their contents if it is Ethernet with a built-in address."""
_CHANGING: Final = frozenset({"usb", "vmbus"})
"""Buses whose interfaces may get other addresses at a reboot: docks, the board's own controller,
and WSL2."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_BIRTH_TIME: Final = 0x800
"""`STATX_BTIME` of statx(2). In the call, this bit asks for the creation time; in the result, it
says that the time is known."""
_HERE: Final = -100
"""`AT_FDCWD` of statx(2): a relative path starts at the working directory."""
_STATX_BYTES: Final = 256
_BIRTH_TIME_AT: Final = 80


def describe_folder(folder: Path) -> AgentFolder:
    """Return the marks of a data folder and its machine."""
    addresses = sorted(filter(None, map(_address, _INTERFACES.glob("*"))))
    boot = ""
    with contextlib.suppress(OSError):
        boot = _BOOT.read_text().strip()
    return AgentFolder(_made_at(folder), tuple(addresses[:ADDRESSES_MAX]), boot)


def _made_at(folder: Path) -> int:
    """Return when a folder was created, in nanoseconds since the epoch; 0: unknown."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(_HERE, os.fsencode(folder), 0, _BIRTH_TIME, found):
        return 0
    (mask,) = struct.unpack_from("I", found)
    seconds, nanoseconds = struct.unpack_from("qI", found, _BIRTH_TIME_AT)
    return max(0, seconds * 10**9 + nanoseconds) if mask & _BIRTH_TIME else 0


def _address(interface: Path) -> str:
    """Return the hardware address of an interface; empty: it has no address of its own."""
    device = interface / "device"
    bus = (device / "subsystem").resolve().name
    if not device.exists() or bus in _CHANGING or (device / "physfn").exists():
        return ""  # A virtual function may get a new address at each start.
    try:
        said = {each: (interface / each).read_text().strip() for each in ("address", *_OWN_ADDRESS)}
    except OSError:  # The interface vanished meanwhile.
        return ""
    address = said.pop("address")
    return address if said == _OWN_ADDRESS else ""
