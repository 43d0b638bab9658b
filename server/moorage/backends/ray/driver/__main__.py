"""Speaks to Ray for the daemon: reads calls, writes answers and events, one JSON object a line.

    {"id": 1, "call": "stop", "arguments": {"workload": "…"}}   →   {"id": 1, "value": …}

The driver ends when its standard input ends; if it ends earlier, `connection` starts it again. So
if Ray hangs or crashes, only this process ends.
"""

import base64
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import ray

from moorage import ray_devices
from moorage.backends.ray.driver import observation
from moorage.backends.ray.driver.groups import GroupError
from moorage.backends.ray.driver.workloads import NotDoneError, UnknownActorError, Workloads
from moorage.backends.ray.node import containers, host
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

BEAT_SECONDS: Final = 2.0
"""Seconds between two checks that Ray answers; each answer is reported to the daemon."""
CALLS_MAX: Final = 1024
"""Maximum calls of each kind at the same time. Starts and stops have separate threads, since both
last long: a start until its workload is ready, a stop until its workload has ended.
"""


class Driver:
    """Carries out the daemon's calls at Ray."""

    def __init__(self, server: str, namespace: str, output: int) -> None:
        self._server = server
        self._output = output
        self._writing = threading.Lock()
        self._client = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]  # Ray has no types for it.
        self._workloads = Workloads(server, namespace, self._report_end)
        self._calls: Mapping[str, Callable[..., JsonValue]] = {
            "discover": self._workloads.discover,
            "status": self._workloads.status,
            "start": self._workloads.start,
            "stop": self._stop,
            "logs": self._logs,
            "execute": self._workloads.execute,
            "observe": self._look,
            "request": lambda bundles: self._over_there(observation.request, bundles),
        }

    def say(self, message: JsonMapping) -> None:
        """Write a message to the daemon as one line; end this process if the daemon is gone."""
        line = json.dumps(message).encode() + b"\n"
        with self._writing:
            try:
                while line:
                    line = line[os.write(self._output, line) :]
            except OSError:
                os._exit(0)

    def announce(self, message: JsonObject) -> None:
        """Register a start when its call arrives, so that a later stop can cancel the start."""
        if message["call"] == "start":
            arguments = message["arguments"]
            workload = str(arguments["plans"][0]["workload"])
            arguments["given_up"] = self._workloads.announced(workload)

    def carry_out(self, message: JsonMapping) -> None:
        """Carry out one call of the daemon, and write its answer."""
        answer: JsonObject
        try:
            answer = {"value": self._calls[message["call"]](**message["arguments"])}
        except UnknownActorError:
            answer = {"kind": "unknown", "error": ""}
        except (NotDoneError, GroupError) as error:
            answer = {"kind": "failure", "error": str(error)}
        except Exception as error:  # noqa: BLE001  # Sent to the daemon as text.
            answer = {"kind": "trouble", "error": f"{type(error).__name__}: {error}"}
        self.say({"id": message["id"], **answer})

    def beat(self) -> None:
        """Report periodically to the daemon that Ray answers."""
        while True:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types for it.
            self._workloads.note_dead_nodes([x["NodeID"] for x in nodes if not x["Alive"]])
            self.say({"beat": time.time()})
            time.sleep(BEAT_SECONDS)  # Pause between two beats.

    def _report_end(self, workload: str, report: JsonMapping) -> None:
        self.say({"ended": workload, "report": report})

    def _logs(self, workload: str, offset: int) -> JsonObject:
        data, start, over, code, attempt = self._workloads.logs(workload, offset)
        text = base64.b64encode(data).decode()
        return {"data": text, "start": start, "over": over, "exit_code": code, "attempt": attempt}

    def _stop(self, workload: str, stop_seconds_max: float | None = None) -> JsonObject | None:
        left = self._workloads.stop(workload, stop_seconds_max)
        if left is not None and left["data"] is not None:
            left["data"] = base64.b64encode(left["data"]).decode()
        return left

    def _look(self) -> JsonObject:
        ours = sorted(self._workloads.actor_ids())
        seen = self._over_there(observation.observe, self._server)
        return {**seen, "ours": sorted({*ours, *self._workloads.actor_ids()})}

    def _over_there(self, work: Callable[..., JsonValue], *arguments: JsonValue) -> JsonValue:
        """Call `work` here, or in a task on the cluster if this process is a `ray://` client."""
        if not self._client:
            return work(*arguments)
        return ray.get(ray.remote(num_cpus=0)(work).remote(*arguments))


def main() -> None:
    """Connect to Ray, and serve calls until the standard input ends."""
    address, server, namespace = sys.argv[1:4]
    output = os.dup(1)
    lines = queue.SimpleQueue[str]()
    # Start to read before `ray.init`, which takes minutes if Ray does not answer: the daemon may
    # end meanwhile.
    threading.Thread(target=read, args=(lines,), daemon=True).start()
    os.dup2(2, 1)  # Keep Ray's prints out of the answers.
    # No node needs this package: its classes travel to the cluster by value.
    ray.cloudpickle.register_pickle_by_value(ray_devices)  # type: ignore[no-untyped-call]  # As above.
    ray.cloudpickle.register_pickle_by_value(observation)  # type: ignore[no-untyped-call]  # As above.
    ray.cloudpickle.register_pickle_by_value(containers)  # type: ignore[no-untyped-call]  # As above.
    ray.cloudpickle.register_pickle_by_value(host)  # type: ignore[no-untyped-call]  # As above.
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False)
    except Exception as error:  # noqa: BLE001  # Sent to the daemon as text.
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        os.write(output, json.dumps({"fatal": text}).encode() + b"\n")
        return
    driver = Driver(server, namespace, output)
    driver.say({"connected": True})
    threading.Thread(target=driver.beat, daemon=True).start()
    kinds = {name: ThreadPoolExecutor(CALLS_MAX) for name in ("start", "stop", "other")}
    while True:
        message = json.loads(lines.get())
        driver.announce(message)
        kinds[message["call"] if message["call"] in kinds else "other"].submit(
            driver.carry_out, message
        )


def read(lines: queue.SimpleQueue[str]) -> None:
    """Put the daemon's messages into `lines`; end this process when the daemon is gone."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
