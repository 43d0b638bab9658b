"""Carries out orders on a machine, except starts; `host` and `own_machine` call it."""

from typing import assert_never

from moorage.backends.agents import wire
from moorage.backends.base import Backend, FileSource, UnsupportedSpecError
from moorage.records.json_values import JsonValue


async def carry_out(backend: Backend, order: wire.BackendOrder | wire.FileOrder) -> JsonValue:
    """Call the backend method of an order on this machine; return its result.

    Raises:
        BackendError: The backend method failed. It may also raise other errors.
    """
    match order:
        case wire.FilesOrder() | wire.ReadFileOrder():
            return await _look_at_files(backend, order)
        case wire.DiscoverOrder():
            return list(await backend.discover())
        case wire.StopOrder(workload, stop_seconds_max):
            return await backend.stop(workload, stop_seconds_max)
        case wire.StatusOrder(workload):
            return await backend.status(workload)
        case wire.ProbeOrder(workload):
            return await backend.probe(workload)
        case wire.ControlOrder(workload, limits):
            return await backend.control(workload, limits)
        case wire.ResetOrder(workload):
            return await backend.reset(workload)
        case wire.ExecuteOrder(workload, command):
            return await backend.execute(
                workload,
                command,
                timeout_seconds=order.timeout_seconds,
                workdir=order.workdir,
                user=order.user,
                environment=order.environment,
            )
        case wire.LogsOrder(workload, offset, attempt):
            return await backend.logs(workload, offset, attempt)
        case _:
            assert_never(order)


async def _look_at_files(backend: Backend, order: wire.FileOrder) -> JsonValue:
    if not isinstance(backend, FileSource):
        raise UnsupportedSpecError("this machine cannot return files")
    if isinstance(order, wire.FilesOrder):
        return await backend.files(order.workload, order.attempt)
    return await backend.read_file(order.workload, order.path, order.offset, order.attempt)
