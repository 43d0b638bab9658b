"""Draws the pictures of the console for the documentation: `python tools/console_pictures.py`.

Starts a daemon, gives it a fleet, requests and a second version of a policy, and takes a picture
of each view in docs/images. Needs the development environment and chromium.
"""

import io
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright
from websockets.sync.client import connect

from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog

FOLDER: Final = Path(__file__).parents[1] / "docs" / "images"
COLOURS: Final = 64
POLICY: Final = "best_fit:1.0-stable"
RUN: Final = """import numpy as np

from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    \"\"\"The node that is left with the least.\"\"\"

    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        left = fleet.gpu_free.sum(1)
        fits = fleet.feasible(demand)
        print("nodes that fit:", int(fits.sum()))
        scores = np.where(fits, left.max() - left, -1)
        return propose(fleet, demand, best_rows(fleet, demand, scores))
"""
CHANGES: Final = (
    ("Drain", (("Cluster", "porto"), ("Node (none: all of it)", "porto-000"))),
    ("Add nodes", (("Cluster", "oslo"), ("Like its node", "oslo-000"), ("How many", "8"))),
)
REQUESTS: Final = [{"inputs": {}, "resources": {"gpus": gpus}} for gpus in (1, 2, 8, 4, 9)]


def cluster(name: str, nodes: int, model: str) -> dict[str, Any]:
    """Return a cluster document with eight GPUs a node and eight nodes a rack."""
    devices = [{"id": str(n), "modelName": model, "memory": 80_000} for n in range(8)]
    return {
        "id": name,
        "nodes": {
            "count": nodes,
            "nodeData": [
                {
                    "id": f"{name}-{n:03}",
                    "rack": f"{name}-r{n // 8}",
                    "gpus": {"count": 8, "gpus": devices},
                    "vcpus": {"count": 96},
                    "memory": 1_000_000,
                }
                for n in range(nodes)
            ],
        },
    }


def seed(running: Running, http: httpx.Client) -> tuple[str, str]:
    """Have something happen; return the ids of a lease and of a refusal."""
    for name, nodes, model in (("oslo", 64, "H100"), ("turin", 48, "A100"), ("porto", 24, "L40S")):
        http.post("/clusters", json=cluster(name, nodes, model)).raise_for_status()
    first = catalog.document("best_fit")
    for version, code in (
        ("1.0", first["code"]),
        ("1.1", first["code"].replace("least", "fewest")),
    ):
        uri = f"best_fit:{version}-stable"
        document = first | {"version": version, "policy_rule_uri": uri, "code": code}
        http.post("/policy", json=document).raise_for_status()
        active = {"policy_rule_uri": uri}
        http.post("/policy-alias/best_fit:stable/activate", json=active).raise_for_status()
    message = {"policy_rule_uri": POLICY, "inputs": {}, "lease": {"ttl_seconds": 3600}}
    lease = refused = ""
    for n in range(150):
        wanted = {"gpus": (1, 2, 4, 8, 3)[n % 5], "models": [("H100", "A100", "L40S")[n % 3]]}
        answer = http.post("/allocate", json=message | {"resources": wanted}).json()
        lease = answer["lease"]["id"]
        if n % 4 == 0:
            give_back(running, answer["lease"])
    wanted = {"gpus": 8, "models": ["H100"], "nodes": 60}
    refused = http.post("/allocate", json=message | {"resources": wanted}).json()["request"]
    return lease, refused


def give_back(running: Running, lease: dict[str, str]) -> None:
    """Release a lease."""
    with connect(running.ws, proxy=None) as socket:
        socket.send(json.dumps({"op": "release", "lease": lease["id"], "token": lease["token"]}))
        socket.recv()


def save(page: Any, name: str) -> None:
    """Write a picture of the page, with few colours: it is of areas and text."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, Image.Quantize.FASTOCTREE).save(
        FOLDER / f"console-{name}.png", optimize=True
    )


def shown(page: Any, url: str) -> None:
    """Show a view, and wait until nothing of it is being loaded."""
    page.goto(url)
    page.get_by_role("heading", level=1).wait_for()
    page.wait_for_function("() => !document.querySelector('.loading')")
    time.sleep(0.5)


def pictures(page: Any, running: Running, lease: str, refused: str) -> None:
    """Take all of them."""
    console = f"{running.http}/console"
    with connect(running.ws, proxy=None) as socket:
        wanted = {"gpus": 8, "nodes": 60, "models": ["H100"]}
        terms = {"ttl_seconds": 3600, "wait_seconds": 3600}
        message = {"adhoc": True, "policy_rule_uri": POLICY, "inputs": {}, "resources": wanted}
        for _ in range(3):
            socket.send(json.dumps(message | {"lease": terms}))
        time.sleep(1)
        for name, path in (
            ("fleet", "fleet/oslo/oslo-003"),
            ("queue", "queue"),
            ("leases", f"leases/{lease}"),
            ("why", f"why/{refused}"),
            ("policies", "policies/best_fit:stable"),
            ("operations", "operations"),
        ):
            shown(page, f"{console}/{path}")
            if name == "queue":
                page.get_by_role("table", name="Queue").get_by_role("link").first.click()
                page.get_by_text("Binding").wait_for()
            save(page, name)
        shown(page, f"{console}/whatif")
        for kind, fields in CHANGES:
            page.get_by_role("button", name=kind, exact=True).click()
            for label, text in fields:
                page.get_by_label(label, exact=True).last.fill(text)
        page.get_by_label("Policy", exact=True).fill(POLICY)
        page.get_by_role("button", name="What if?").click()
        page.get_by_role("region", name="What would happen").wait_for()
        save(page, "whatif")
        shown(page, f"{console}/playground")
        page.get_by_label("Policy (Python)").fill(RUN)
        page.get_by_label("Requests (JSON list)").fill(json.dumps(REQUESTS))
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("table", name="Results").wait_for()
        save(page, "playground")


def main() -> None:
    """Start what is needed, and stop it."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("chromium is not here; on Debian: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    with (
        daemon() as running,
        httpx.Client(base_url=running.http, timeout=60, trust_env=False) as http,
        sync_playwright() as playwright,
    ):
        lease, refused = seed(running, http)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 860}, color_scheme="light")
        pictures(page, running, lease, refused)
        browser.close()


if __name__ == "__main__":
    main()
