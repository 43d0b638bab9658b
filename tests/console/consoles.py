"""Pages of the console, and daemons that are filled by API, for all tests of the console."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog

WIDE = {"width": 1600, "height": 900}
PHONE = {"width": 390, "height": 844}
POLICY = "first_fit:1.0-stable"
_NAMES = "Overview Fleet Queue Leases Why Policies Playground What-if Operations".split()  # noqa: SIM905  # Short.
LOADS_MAX = 5
_CHANGED = "net::ERR_NETWORK_CHANGED"
VIEWS = {name.lower().replace("-", ""): name for name in _NAMES}


@contextmanager
def open_page(chromium: Any, **options: Any) -> Iterator[Any]:
    context = chromium.new_context(viewport=WIDE, **options)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if is_refusal(said) else None)
    page.set_default_timeout(60_000)
    load_again_if_dropped(page)
    try:
        yield page
    finally:
        context.close()
    assert not wrong, wrong


def load_again_if_dropped(page: Any) -> None:
    """Make `goto` load the page again if Chromium drops a part of it.

    Chromium drops loading files when the machine gets or loses a network interface, which
    containers of other tests cause.
    """
    load, dropped = page.goto, list[str]()
    page.on(
        "requestfailed",
        lambda request: dropped.append(request.url) if request.failure == _CHANGED else None,
    )

    def goto(url: str) -> Any:
        for _ in range(LOADS_MAX):
            dropped.clear()
            try:
                reply = load(url)
            except Exception as error:
                if _CHANGED not in str(error):
                    raise
            else:
                if not dropped:
                    return reply
        pytest.fail(f"Chromium dropped {dropped or url} {LOADS_MAX} times: {_CHANGED}")

    page.goto = goto


def enter(page: Any, url: str, token: str) -> None:
    """Show a page that needs a token, and log in on it."""
    page.goto(url)
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1).wait_for()


def is_refusal(said: Any) -> bool:
    """Return whether the browser reports a refusal; lost connections are not a refusal."""
    return said.type == "error" and "Content Security Policy" in said.text


@dataclass
class Seeded:
    """A daemon with a fleet, ids of its leases, and the id of a request that was refused."""

    running: Running
    http: httpx.Client
    leases: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def console(self) -> str:
        return f"{self.running.http}/console"

    def fleet(self, cluster: str, nodes: int, gpus: int = 8, model: str = "A100") -> None:
        devices = [{"id": str(n), "modelName": model, "memory": 80_000} for n in range(gpus)]
        node = {"gpus": {"count": gpus, "gpus": devices}, "vcpus": {"count": 64}, "memory": 512_000}
        rows = [{"id": f"{cluster}-n{n:04}", "rack": f"r{n // 8}", **node} for n in range(nodes)]
        document = {"id": cluster, "nodes": {"count": nodes, "nodeData": rows}}
        assert self.http.post("/clusters", json=document).status_code == 201

    def second_version(self) -> None:
        """Register a second version of the policy `first_fit`, `first_fit:1.1-stable`."""
        names = {"version": "1.1", "policy_rule_uri": "first_fit:1.1-stable"}
        document = catalog.document("first_fit") | names
        document["code"] = document["code"].replace("All equal", "Equal")
        assert self.http.post("/policy", json=document).json()["success"]

    @contextmanager
    def waiter(self, gpus: int, nodes: int = 1) -> Iterator[str]:
        """Send a request that waits, from a separate client; yield the request."""
        message = {
            "adhoc": True,
            "id": "waits",
            "policy_rule_uri": POLICY,
            "inputs": {},
            "resources": {"gpus": gpus, "nodes": nodes},
            "lease": {"ttl_seconds": 3600, "wait_seconds": 3600},
        }
        token = self.http.headers.get("Authorization")
        headers = {"Authorization": token} if token else None
        with connect(self.running.ws, additional_headers=headers) as socket:
            socket.send(json.dumps(message))
            give_up_at = time.monotonic() + 60
            while time.monotonic() < give_up_at:
                socket.send(json.dumps({"op": "queue", "id": "queue"}))
                rows = json.loads(socket.recv(timeout=60))["data"]["waiting"]
                if rows:
                    yield rows[-1]["request"]
                    return
                time.sleep(0.05)  # No event reports that the request waits.
            pytest.fail("the request does not wait")

    def ask(self, gpus: int = 1, **fields: Any) -> dict[str, Any]:
        message = {
            "policy_rule_uri": POLICY,
            "inputs": {},
            "resources": {"gpus": gpus},
            "lease": {"ttl_seconds": 3600},
        }
        answer: dict[str, Any] = self.http.post("/allocate", json=message | fields).json()
        if answer["success"]:
            self.leases.append(answer["lease"]["id"])
        return answer


@contextmanager
def seed_server(
    data: Path | None = None, *, options: tuple[str, ...] = (), **environment: str
) -> Iterator[Seeded]:
    with daemon(data, options=options, environment=environment) as running:
        token = environment.get("MOORAGE_TOKENS", "").partition(",")[0].partition(":")[2]
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(base_url=running.http, timeout=30, headers=headers) as http:
            seeded = Seeded(running, http)
            if http.get("/policy").json()["data"] == []:
                assert http.post("/policy", json=catalog.document("first_fit")).json()["success"]
            yield seeded


def legend_counts(page: Any) -> Counter[str]:
    """Return the counts of slots in the map's legend, by state; 0 for a missing entry."""
    items = page.get_by_role("list", name="What the colours mean").get_by_role("listitem")
    found: Counter[str] = Counter()
    for text in items.all_inner_texts():
        *name, count = text.replace(",", "").split()
        found[name[-1]] = int(count)
    return found
