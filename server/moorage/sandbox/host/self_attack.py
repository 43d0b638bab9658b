"""The self-test of the wall: nothing is served where an attack gets through. `sandbox` calls it."""

from moorage.sandbox.cell import self_test
from moorage.sandbox.host.contract import JailError
from moorage.sandbox.host.spawner import Spawner


async def attack_self(spawner: Spawner) -> dict[str, str]:
    """Let fresh cells attack their wall; return how each attack was stopped.

    Raises:
        JailError: One got through, or the kernel does not know of a filter.
    """
    probes: dict[str, str] = {}
    if not await spawner.filter_from_outside():
        raise JailError(
            "seccomp",
            "the kernel does not confirm a filter on a cell (/proc/PID/status); nothing is "
            "served. Run `moored doctor`, or accept the risk with --sandbox unsafe",
        )
    names = (*self_test.REFUSED, *self_test.DEADLY)
    for name in names:
        outcome = await spawner.attack(name)
        expected = "refused" if name in self_test.REFUSED else "killed"
        # A kernel without the call at all refuses it with ENOSYS, which is as good.
        if not outcome.startswith((expected, "refused")) or outcome.startswith("BREACH"):
            raise JailError(
                name,
                f"the self-test attack was not stopped ({outcome}). Nothing is served: run "
                "`moored doctor`, use a kernel with seccomp filters, or accept the risk with "
                "--sandbox unsafe",
            )
        probes[name] = outcome
    return probes
