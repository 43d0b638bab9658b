"""The program that `moorage pool serve` executes; its only argument is a JSON object of options.

The program prints one line of JSON once it is ready for requests, and exits with 2 if it never is.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Final

from moorage.launch import reason_of
from moorage.pool_server.holdings import TTL_SECONDS_MAX
from moorage.pool_server.serving import serve
from moorage.records.json_values import JsonObject
from moorage.slots import make_resource_pool, read_specification
from moorage_client.cli.output import failure, note, print_json
from moorage_client.pool.addresses import Tcp, Uds, address_here, parse_address

EXIT_USAGE: Final = 2


def main() -> None:
    """Serve the pool of the JSON argument, or print why that is impossible."""
    job = json.loads(sys.argv[1])
    try:
        _serve(job)
    except ValueError as error:
        _refuse(job, str(error))
    except OSError as error:
        _refuse(job, reason_of(error))


def _serve(job: JsonObject) -> None:
    if not 0 < job["ttl"] <= TTL_SECONDS_MAX:
        raise ValueError(f"--ttl: expected a number above 0, up to {TTL_SECONDS_MAX:.0f} seconds")
    config = job["config"]
    if job["file"]:
        config["resource_pool"] = read_specification(
            Path(job["file"]).read_text(encoding="utf-8-sig")
        )
    address = parse_address(job["address"]) if job["address"] else address_here(os.environ)
    asyncio.run(serve(make_resource_pool(config), address, _ready, note, job["ttl"]))


def _ready(address: Uds | Tcp) -> None:
    sys.stdout.write(json.dumps({"event": "ready", "address": str(address)}) + "\n")
    sys.stdout.flush()


def _refuse(job: JsonObject, message: str) -> None:
    message = f"{message} (try --help)"
    if job["json"]:
        print_json(failure("usage", message))
    else:
        note(f"moorage: {message}")
    raise SystemExit(EXIT_USAGE)


if __name__ == "__main__":
    main()
