"""Draws the pictures of the console for the documentation: `python tools/console_pictures.py`.

It starts a daemon with a fleet of 1,213 nodes, 4,165 leases, waiting requests, refusals, two
versions of a policy and three machines with agents, one of them lost. It takes a picture of each
view into docs/images. With a folder as its argument, it takes all views in both themes, in a wide
window and on a phone, into that folder. It needs the development environment and chromium.
"""

import io
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright
from websockets.sync.client import ClientConnection, connect

from moorage.testing.daemon_process import Running, child, daemon, serve_variables
from moorage_policies import catalog

FOLDER: Final = Path(__file__).parents[1] / "docs" / "images"
COLOURS: Final = 64
POLICY: Final = "best_fit:1.0-stable"
LEASES: Final = 4165
RELEASED: Final = 500
"""This many leases end again, so that free GPUs are spread over the fleet."""
PIPELINED: Final = 64
WIDE: Final = {"width": 1440, "height": 900}
PHONE: Final = {"width": 390, "height": 844}
TENANTS: Final = ("vision", "speech", "search", "robotics", "interns")
OPERATOR: Final = "operations"
CLUSTERS: Final = (
    ("oslo", 300, 8, "H100", 0.94),
    ("turin", 300, 8, "A100", 0.86),
    ("porto", 400, 2, "T4", 0.7),
    ("lima", 113, 4, "V100", 0.55),
    ("quito", 100, 0, "", 0.3),
)
SMALL: Final = ("porto", 2, "T4")
SIZES: Final = (1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 8)
CHANGES: Final = (("Drain", (("Cluster", "porto"), ("Node (empty: all nodes)", "porto-000"))),)
"""Changes in the form of What-if, besides the first example there."""
REFUSED: Final = {"no_capacity": 26, "never_fits": 14}
"""Requests that `fill` has refused, by code."""
MADE_UP: Final = {"step=5": (5, 24 * 12), "minutes=60&step=1": (1, 60)}
"""By query of `/history`: the minutes between two points, and the number of points."""
SHARES: Final = 0.15
"""This fraction of the requests for one GPU requests half of a GPU."""
SEED: Final = 7
MOORED: Final = (sys.executable, "-P", "-m", "moorage")
AGENTS: Final = ("desk-1", "desk-2", "desk-3")
AGENT_LOST_SECONDS: Final = 4


def cluster(name: str, nodes: int, gpus: int, model: str) -> dict[str, Any]:
    """Return a cluster document with eight nodes a rack."""
    devices = [{"id": str(n), "modelName": model, "memory": 80_000} for n in range(gpus)]
    return {
        "id": name,
        "nodes": {
            "count": nodes,
            "nodeData": [
                {
                    "id": f"{name}-{n:03}",
                    "rack": f"{name}-r{n // 8}",
                    "gpus": {"count": gpus, "gpus": devices},
                    "vcpus": {"count": 96},
                    "memory": 1_000_000,
                }
                for n in range(nodes)
            ],
        },
    }


def publish(http: httpx.Client) -> None:
    """Register the fleet and two versions of a policy."""
    for name, nodes, gpus, model, _ in CLUSTERS:
        http.post("/clusters", json=cluster(name, nodes, gpus, model)).raise_for_status()
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


def wishes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield tenants and requests: shares, GPUs, whole nodes, CPU; for minutes up to days."""
    chance = random.Random(SEED)  # noqa: S311  # No secret: it makes the same pictures each time.
    held: dict[str, float] = {}
    while True:
        name, nodes, gpus, model, fill = chance.choice(CLUSTERS)
        resources: dict[str, Any] = {"cpu_milli": 4000, "memory_mib": 16_000}
        if gpus:
            many = min(chance.choice(SIZES), gpus)
            resources |= {"gpus": many, "models": [model]}
            resources |= {"cpu_milli": 8000 * many, "memory_mib": 48_000 * many}
            if many == 1 and chance.random() < SHARES:
                resources["gpu_milli"] = 500
            held[name] = held.get(name, 0) + many * resources.get("gpu_milli", 1000) / 1000
            if held[name] > fill * nodes * gpus:
                held[name] -= many * resources.get("gpu_milli", 1000) / 1000
                continue
        hours = chance.choice((0.3, 1, 2, 6, 12, 24, 72)) * (0.5 + chance.random())
        project = chance.choice(("", "training", "serving"))
        lease = {"ttl_seconds": round(hours * 3600), "project": project}
        yield (
            chance.choice(TENANTS),
            {"inputs": {}, "resources": resources, "lease": lease, "policy_rule_uri": POLICY},
        )


def give_back(socket: ClientConnection, lease: dict[str, Any]) -> None:
    """Release a lease."""
    socket.send(json.dumps({"op": "release", "lease": lease["id"], "token": lease["token"]}))
    socket.recv()


@dataclass(frozen=True, slots=True)
class Subjects:
    """The objects in pictures: ids of leases and of a refused request.

    Args:
        lease: A lease of a whole node.
        released: A lease; after its release, a waiting request is granted.
        tenant: The tenant of `released`.
        refused: A refused request.
    """

    lease: str
    released: str
    tenant: str
    refused: str


def fill(sockets: dict[str, ClientConnection]) -> Subjects:
    """Let tenants take leases, and make refused requests."""
    source, leases = wishes(), list[tuple[str, dict[str, Any]]]()
    while len(leases) < LEASES + RELEASED:
        batch = [next(source) for _ in range(min(PIPELINED, LEASES + RELEASED - len(leases)))]
        for number, (tenant, message) in enumerate(batch):
            sockets[tenant].send(json.dumps({"adhoc": True, "id": number, **message}))
        for tenant, _ in batch:
            answer = json.loads(sockets[tenant].recv())
            if answer["success"]:
                leases.append((tenant, answer["lease"]))
    random.Random(SEED).shuffle(leases)  # noqa: S311  # No secret.
    for tenant, each in leases[:RELEASED]:
        give_back(sockets[tenant], each)
    held = leases[RELEASED:]
    lease = max(held, key=lambda each: len(each[1]["placement"][0]["gpus"]))[1]["id"]
    whole = [each for each in held if is_whole_node(each[1]["placement"][0])]
    released = max(
        whole, key=lambda each: each[1]["expires_at"]
    )  # It must last until the last picture.
    for number in range(sum(REFUSED.values())):
        wanted = {"gpus": 8, "models": ["H100" if number % 3 else "H200"], "nodes": 200}
        request = {"inputs": {}, "resources": wanted, "lease": {}, "policy_rule_uri": POLICY}
        sockets["search"].send(json.dumps({"adhoc": True, "id": number, **request}))
        refused = json.loads(sockets["search"].recv())["request"]
    return Subjects(lease, released[1]["id"], released[0], refused)


def is_whole_node(share: dict[str, Any]) -> bool:
    """Return whether a share has both GPUs of a node in `SMALL`."""
    return share["cluster_id"] == SMALL[0] and len(share["gpus"]) == SMALL[1]


def wait_in_line(sockets: dict[str, ClientConnection], tenant: str, empty: int) -> None:
    """Make requests that wait; the last one needs one node more than are empty in `SMALL`."""
    for number, (whose, gpus, nodes, model) in enumerate(
        (
            ("vision", 8, 80, "H100"),
            ("speech", 8, 64, "H100"),
            ("vision", 4, 160, "H100"),
            ("robotics", 8, 100, "H100"),
            ("search", 2, 280, "H100"),
            (tenant, SMALL[1], empty + 1, SMALL[2]),
        )
    ):
        request = {
            "policy_rule_uri": POLICY,
            "inputs": {},
            "resources": {"gpus": gpus, "nodes": nodes, "models": [model]},
            "lease": {"ttl_seconds": 7200, "wait_seconds": 86_400, "priority": number % 3},
        }
        sockets[whose].send(json.dumps({"adhoc": True, "id": f"w{number}", **request}))


def join_agents(running: Running, folder: Path, stack: ExitStack) -> None:
    """Start agents, which join; the last machine is lost."""
    for name in AGENTS:
        words = ("agent", "token", "--cluster", "desks", "--data", str(folder / "data"))
        made = subprocess.run([*MOORED, *words], check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  # Our own program.
        place = ("--server", running.ws, "--data", str(folder / name), "--name", name)
        command = [*MOORED, "agent", *place, "--no-machine-id", "--token", made.stdout.strip()]
        started = child(command, folder / f"{name}.log", serve_variables())
        process, _ = stack.enter_context(started)
    process.kill()


def lengthened(document: dict[str, Any], step: int, points: int) -> dict[str, Any]:
    """Return an answer of `/history` with invented points before its current values."""
    now = document["data"]["now"]
    hours = [24 * (n + 1) / points for n in range(points)]
    day = [math.sin((hour - 9) / 24 * 2 * math.pi) for hour in hours]
    scale = [(0.85 + 0.12 * each) / (0.85 + 0.12 * day[-1]) for each in day]
    busy = [
        max(0.0, each + 0.15 * math.sin(3 * hour)) for each, hour in zip(day, hours, strict=True)
    ]

    def like(value: float, most: float) -> list[int]:
        return [round(min(most, value * each)) for each in scale]

    def up_to(most: float) -> list[int]:
        return [round(most * each) for each in busy]

    def refused(code: str, most: float) -> list[int]:
        hour = 60 // step  # The lists of refusals show the last hour.
        return [*(1 + each for each in up_to(most)[:-hour]), *[0] * (hour - 1), REFUSED[code]]

    times = {
        "p50": [0.004 + each / 300 for each in busy],
        "p99": [0.03 + each / 20 for each in busy],
    }
    document["data"] |= {
        "at": [now["at"] - 60 * step * (points - 1 - n) for n in range(points)],
        "minutes": [step] * points,
        "models": {
            name: {"total": [each["total"]] * points, "used": like(each["used"], each["total"])}
            for name, each in now["models"].items()
        },
        "tenants": {name: like(each, 1e9) for name, each in now["tenants"].items()},
        "waiting": [*up_to(now["waiting"] * 1.6)[:-1], now["waiting"]],
        "longest_wait_seconds": [*up_to(2 * 3600)[:-1], now["longest_wait_seconds"]],
        "failing": [0] * points,
        "grants": [20 + 5 * each for each in up_to(60)],
        "grant": times,
        "evaluation": times,
        "commit": times,
        "loop_seconds": [0.002] * points,
        "memory_mib": [now["memory_mib"]] * points,
        "sessions": [now["sessions"]] * points,
        "refusals": {
            "no_capacity": refused("no_capacity", 9),
            "never_fits": refused("never_fits", 3),
        },
    }
    return document


def made_up(route: Any) -> None:
    """Answer `/history` with `lengthened`, since a real history takes a day."""
    answer = route.fetch()
    route.fulfill(
        response=answer, json=lengthened(answer.json(), *MADE_UP[route.request.url.split("?")[1]])
    )


def show_view(page: Any, url: str) -> None:
    """Show a view, and wait until it is loaded."""
    page.goto(url)
    page.get_by_role("heading", level=1).wait_for()
    page.wait_for_function("() => !document.querySelector('.loading')")
    time.sleep(0.7)  # No event reports that a canvas is drawn.


def views(page: Any, console: str, subjects: Subjects) -> Iterator[str]:
    """Show one view after the other."""
    for name, path in (
        ("overview", "overview"),
        ("fleet", "fleet/oslo/oslo-003"),
        ("leases", "leases"),
        ("lease", f"leases/{subjects.lease}"),
        ("why", f"why/{subjects.refused}"),
        ("policies", "policies/best_fit:stable"),
        ("operations", "operations"),
    ):
        show_view(page, f"{console}/{path}")
        yield name
    show_view(page, f"{console}/fleet/oslo/oslo-003")
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("dialog").get_by_text("Uncordon undoes it").wait_for()
    page.wait_for_function("() => !document.querySelector('.loading')")
    yield "dialog"
    show_view(page, f"{console}/queue")
    page.get_by_role("table", name="Queue").get_by_role("link").first.click()
    page.get_by_role("heading", name="Nodes left after each step").wait_for()
    yield "queue"
    show_view(page, f"{console}/whatif")
    for kind, fields in CHANGES:
        page.get_by_role("button", name=kind, exact=True).click()
        for label, text in fields:
            page.get_by_label(label, exact=True).last.fill(text)
    page.get_by_role("button", name="What if?").click()
    page.get_by_role("region", name="What would happen").wait_for()
    yield "whatif"
    show_view(page, f"{console}/playground")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("table", name="Results").wait_for()
    yield "playground"


def release(browser: Any, console: str, subjects: Subjects, look: dict[str, Any]) -> Any:
    """Open the dialog of a release, as the tenant sees it."""
    page = browser.new_page(**look)
    enter(page, console, subjects.tenant)
    show_view(page, f"{console}/leases/{subjects.released}")
    panel = page.get_by_role("complementary", name=f"Lease {subjects.released}")
    panel.get_by_role("button", name="Release", exact=True).click()
    page.get_by_role("dialog").get_by_text("JSON").wait_for()
    return page


def enter(page: Any, console: str, name: str) -> None:
    """Log in."""
    page.set_default_timeout(60_000)
    page.goto(console)
    page.get_by_label("Token").fill(f"of-{name}")
    page.keyboard.press("Enter")
    page.get_by_role("main").get_by_role("heading", name="Overview").wait_for()


def save(page: Any, path: Path, *, whole: bool = False) -> None:
    """Write a picture of the page, with few colours: it only has areas and text."""
    picture = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
    picture.quantize(COLOURS, Image.Quantize.FASTOCTREE).save(path, optimize=True)


def take(browser: Any, running: Running, subjects: Subjects, folder: Path | None) -> None:
    """Take all pictures."""
    looks = [("", WIDE, "light")]
    if folder is not None:
        sizes = (("wide-", WIDE), ("phone-", PHONE))
        looks = [(n + t + "-", size, t) for n, size in sizes for t in ("light", "dark")]
    for prefix, size, theme in looks:
        look, console = {"viewport": size, "color_scheme": theme}, f"{running.http}/console"
        page = browser.new_page(**look)
        enter(page, console, OPERATOR)
        for query in MADE_UP:
            page.route(f"**/history?{query}", made_up)
        for name in views(page, console, subjects):
            if folder is not None:
                save(page, folder / f"{prefix}{name}.png", whole=name != "dialog")
            elif name not in {"lease", "dialog"}:
                save(page, FOLDER / f"console-{name}.png", whole=name == "overview")
        page.close()
        if folder is not None:
            page = release(browser, console, subjects, look)
            save(page, folder / f"{prefix}release.png")
            page.close()


def main() -> None:
    """Start the daemon and the browser, take the pictures, and stop both."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("chromium is not here; on Debian: apt-get install chromium")
    folder = Path(sys.argv[1]) if sys.argv[1:] else None
    kept = Path(tempfile.mkdtemp(prefix="moorage-pictures-"))
    (folder or FOLDER).mkdir(parents=True, exist_ok=True)
    names = (OPERATOR, *TENANTS)
    settings = {
        "MOORAGE_TOKENS": ",".join(f"{name}:of-{name}" for name in names),
        "MOORAGE_OPERATORS": OPERATOR,
        "MOORAGE_BACKENDS": "local",
        "MOORAGE_AGENT_LOST_SECONDS": str(AGENT_LOST_SECONDS),
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, kept, ignore_errors=True)
        running = stack.enter_context(daemon(kept / "data", environment=settings))
        headers = {"Authorization": f"Bearer of-{OPERATOR}"}
        http = httpx.Client(base_url=running.http, timeout=60, trust_env=False, headers=headers)
        publish(stack.enter_context(http))
        sockets = {
            name: stack.enter_context(
                connect(
                    running.ws,
                    proxy=None,
                    additional_headers={"Authorization": f"Bearer of-{name}"},
                )
            )
            for name in names
        }
        found = fill(sockets)
        now = http.get("/history").json()["data"]["now"]
        wait_in_line(sockets, found.tenant, now["models"][SMALL[2]]["nodes_empty"])
        join_agents(running, kept, stack)
        place = {"op": "cordon", "cluster": "porto", "node": "porto-007", "reason": "fan is loud"}
        sockets[OPERATOR].send(json.dumps(place))
        while not http.get("/history").json()["data"]["now"]["agents"]["lost"]:
            time.sleep(0.5)  # No event reports that an agent is lost.
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        if sys.argv[2:] == ["--stay"]:
            sys.stdout.write(f"{running.http} {found}\n")
            sys.stdout.flush()
            sys.stdin.read()
        take(browser, running, found, folder)
        browser.close()


if __name__ == "__main__":
    main()
