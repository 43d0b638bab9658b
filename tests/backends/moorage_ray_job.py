"""A user's job on Ray, which reports the devices that its tasks and actors see, then continues."""

import json
import os
import sys
import time

import ray


@ray.remote(num_cpus=0, num_gpus=1)
def device(seconds=0.0):
    time.sleep(seconds)  # Work: meanwhile other tasks get the other devices.
    context = ray.get_runtime_context()
    return context.get_node_id(), *context.get_accelerator_ids()["GPU"]


@ray.remote(num_cpus=0, num_gpus=1)
def order_of_devices():
    return os.environ.get("CUDA_DEVICE_ORDER")


@ray.remote(num_cpus=0)
def below():
    return ray.get(device.remote())


@ray.remote(num_cpus=0, num_gpus=1)
class Holder:
    def device(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def main() -> None:
    devices, mode = int(sys.argv[1]), sys.argv[2]
    ray.init(log_to_driver=False, namespace="a user's")
    seen = {"tasks": sorted(ray.get([device.remote(1) for _ in range(devices)]))}
    seen["below"] = ray.get(below.remote())
    if devices:
        seen["order"] = ray.get(order_of_devices.remote())
    try:
        device.options(num_gpus=devices + 1).remote()
    except ValueError as error:
        seen["more"] = str(error)
    if mode == "stays":
        holder = Holder.options(name="stays", lifetime="detached").remote()
        seen["stays"] = ray.get(holder.device.remote())
    print(json.dumps(seen), flush=True)
    if mode != "ends":
        time.sleep(1000)  # Work until the test ends the job.


if __name__ == "__main__":
    main()
