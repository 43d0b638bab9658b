"""The example client in the allocation server's documents runs as printed there.

`documented_client.txt` is that example, byte for byte (OpenOS.AI documentation, Apache-2.0). Only
its placeholder for the server, and in one test the empty one for the policy, are filled in.
"""

import asyncio
import json
import sys
from pathlib import Path

PRINTED = Path(__file__).with_name("documented_client.txt").read_text()


async def run(port, source: str) -> str:
    """Run the client against the gateway, and return the reply that it logs."""
    assert "<server-url>:8765" in source
    source = source.replace("<server-url>:8765", f"127.0.0.1:{port.number}")
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        _, logged = await client.communicate(source.encode())
    assert client.returncode == 0
    lines = logged.decode().splitlines()
    assert "INFO:root:Request sent to server." in lines
    return lines[-1].partition("Response received: ")[2]


async def test_an_existing_client_reads_empty_fields_and_policy_values(port):
    reply = json.loads(await run(port, PRINTED))
    assert reply["success"] is False
    assert reply["message"] == "Missing required fields: policy_rule_uri"
    assert reply["error"]["missing"] == ["policy_rule_uri"]
    placeholder = '"policy_rule_uri": ""'
    assert placeholder in PRINTED
    filled = PRINTED.replace(placeholder, '"policy_rule_uri": "best-fit:1.0-stable"')
    assert json.loads(await run(port, filled)) == {"success": True, "data": {}}
    assert port.harbour.seen[0][2].policy_rule_uri == "best-fit:1.0-stable"
