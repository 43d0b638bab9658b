"""Tree and map of the fleet agree, no change is missed, and drawing is quick."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from consoles import POLICY, Seeded, legend_counts, open_page, seed_server
from websockets.sync.client import connect

pytestmark = pytest.mark.heavy  # A browser.

BYTES_MAX = 50_000
WHOLE = 20_000
"""Least number of rectangles for all slots of ten thousand GPUs: two for each GPU."""
CHANGES = 100
GPUS_EACH = 8


def tree(page: Any) -> Any:
    return page.get_by_role("treegrid", name="Fleet as a tree")


def agree(page: Any, seeded: Seeded) -> None:
    page.get_by_role("list", name="What the colours mean").wait_for()
    deadline = time.monotonic() + 60
    while legend_counts(page)["free"] != truth(seeded):
        assert time.monotonic() < deadline, (legend_counts(page), truth(seeded))
        time.sleep(0.1)  # The page updates its counts twice a second.


def test_keys_move_through_the_tree(page: Any, console_server: Seeded) -> None:
    page.goto(f"{console_server.console}/fleet")
    tree(page).wait_for()
    page.keyboard.press("j")
    east = tree(page).get_by_role("row", name="east")
    assert east.get_attribute("aria-expanded") == "false"
    page.keyboard.press("ArrowRight")
    rack = tree(page).get_by_role("row", name="r0")
    rack.wait_for()
    assert rack.get_attribute("aria-level") == "2"
    assert rack.get_attribute("aria-setsize") == "3"
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/fleet/east/east-n0000")
    tree(page).get_by_role("row", name="GPU 0").wait_for()
    page.get_by_role("region", name="east/east-n0000").get_by_text("Leases here").wait_for()
    page.keyboard.press("ArrowLeft")
    tree(page).get_by_role("row", name="GPU 0").wait_for(state="detached")
    assert tree(page).locator("[tabindex='0']").count() == 1


def test_the_map_follows_changes_and_a_click_opens_a_node(
    page: Any, console_server: Seeded
) -> None:
    page.goto(f"{console_server.console}/fleet")
    shape = page.get_by_role("region", name="Shapes").get_by_role("button", name="8 GPUs").first
    shape.click()
    assert shape.get_attribute("aria-pressed") == "true"
    assert "if defragmented" in shape.inner_text()
    agree(page, console_server)
    console_server.ask(3)
    agree(page, console_server)
    canvas = page.get_by_role("img", name="Map of the fleet")
    canvas.click(position={"x": 30, "y": 40})  # Below the names of the cluster and the rack.
    page.wait_for_url("**/fleet/east/east-n0000")
    assert canvas.evaluate("each => each.painter.times.length") > 0


BLOCKS = """each => {
    const {fleet, layout} = each.painter;
    const place = n => [fleet.clusters[fleet.cluster[n]], fleet.rack[n], layout.x[n], layout.y[n]];
    return fleet.ids.map((_, n) => place(n));
}"""


def test_the_nodes_of_a_rack_are_a_block_below_its_name(page: Any, console_server: Seeded) -> None:
    page.goto(f"{console_server.console}/fleet")
    agree(page, console_server)
    canvas = page.get_by_role("img", name="Map of the fleet")
    page.wait_for_function("() => document.querySelector('canvas').painter.layout")
    blocks: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for cluster, rack, x, y in canvas.evaluate(BLOCKS):
        blocks.setdefault((cluster, rack), set()).add((x, y))
    assert {len({x for x, _ in block}) for block in blocks.values()} == {1}, "a column per rack"
    assert {len(block) for block in blocks.values()} == {8}
    labels = canvas.evaluate("each => each.painter.layout.labels")
    named = {(each["text"], each["x"], each["y"] + 16) for each in labels}
    for (_, rack), block in blocks.items():
        assert (rack, *min(block)) in named


def test_after_missed_deltas_the_map_is_loaded_again(page: Any, console_server: Seeded) -> None:
    lost: list[str] = []

    def losing(route: Any) -> None:
        server = route.connect_to_server()

        def pass_on(message: str) -> None:
            if '"event":"delta"' in message and not lost:
                lost.append(message)
            else:
                route.send(message)

        server.on_message(pass_on)

    page.route_web_socket("**", losing)
    page.goto(f"{console_server.console}/fleet")
    agree(page, console_server)
    while not lost:
        console_server.ask(1)
        page.wait_for_timeout(300)
    console_server.ask(1)
    agree(page, console_server)
    page.keyboard.press("g")
    page.keyboard.press("o")
    gaps = page.locator("dt", has_text="gaps in the map").locator("xpath=../dd")
    assert int(gaps.inner_text()) >= 1


@pytest.fixture(scope="module")
def small_server() -> Iterator[Seeded]:
    with seed_server() as seeded:
        seeded.fleet("east", 2)
        yield seeded


@pytest.fixture
def small(small_server: Seeded) -> Iterator[Seeded]:
    """A server with two nodes, without leases and cordons of earlier tests."""
    yield small_server
    for lease in small_server.leases:
        say(small_server, {"op": "release", "lease": lease})
    small_server.leases.clear()
    say(small_server, {"op": "uncordon", "cluster": "east", "node": "east-n0000"})


def test_the_map_lists_a_cordoned_node_whose_slots_are_all_held(page: Any, small: Seeded) -> None:
    """All slots of the node are held, so no idle slot shows by its colour that it is closed."""
    small.ask(8)
    say(small, {"op": "cordon", "cluster": "east", "node": "east-n0000"})
    page.goto(f"{small.console}/fleet")
    out = page.get_by_role("table", name="Out of service")
    out.get_by_role("row", name="east/east-n0000 cordoned").wait_for()
    legend = page.get_by_role("list", name="What the colours mean")
    legend.get_by_text("cordoned: whole node 1").wait_for()
    numbers = page.get_by_role("list", name="Numbers")
    numbers.get_by_text("8 free in whole or part, 8 wholly").wait_for()
    agree(page, small)


def say(seeded: Seeded, message: dict[str, Any]) -> dict[str, Any]:
    with connect(seeded.running.ws) as socket:
        socket.send(json.dumps(message))
        answer: dict[str, Any] = json.loads(socket.recv(timeout=60))
    assert answer["success"], answer
    return answer


def truth(seeded: Seeded) -> int:
    """Return the number of free GPUs that the server reports."""
    rows = say(seeded, {"op": "fleet"})["data"]["clusters"]
    return sum(row["gpu_milli_free"] for row in rows) // 1000


def test_the_map_can_show_the_fleet_at_an_earlier_time(page: Any, small: Seeded) -> None:
    """The page's clock is five minutes ahead, so its "five minutes ago" is the present."""
    small.ask(3)
    then = say(small, {"op": "decisions"})["data"]["decisions"][0]["at"]
    time.sleep(0.1)  # The page's clock has milliseconds.
    small.ask(2)
    page.clock.set_fixed_time(then + 300.05)
    page.goto(f"{small.console}/fleet")
    agree(page, small)
    assert legend_counts(page)["held"] == 5
    minutes = page.get_by_role("slider", name="Time")
    minutes.focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("As it was").wait_for()
    assert legend_counts(page)["held"] == 3
    small.ask(1)
    page.keyboard.press("ArrowLeft")
    page.get_by_role("img", name="0 GPUs on 0 nodes").wait_for()
    page.keyboard.press("End")
    agree(page, small)
    assert legend_counts(page)["held"] == 6


def test_the_map_lists_reservations(page: Any, small: Seeded) -> None:
    page.goto(f"{small.console}/fleet")
    listed = page.get_by_role("region", name="Reservations")
    listed.get_by_text("No reservation that you may see.").wait_for()
    now = time.time()
    when = {"starts_at": now + 3600, "ends_at": now + 7200}
    say(small, {"op": "reserve", "resources": {"gpus": 1}, "tenant": "ann", **when})
    row = listed.get_by_role("table", name="Reservations").get_by_role("row").last
    row.get_by_text("ann").wait_for()
    row.get_by_role("link", name="east/east-n0000").click()
    page.wait_for_url("**/fleet/east/east-n0000")


@pytest.fixture(scope="module")
def large() -> Iterator[Seeded]:
    """A server with 10,000 GPUs."""
    with seed_server() as seeded:
        for n in range(5):
            seeded.fleet(f"c{n}", 250)
        yield seeded


def churn(seeded: Seeded) -> None:
    """Lease and release nodes, one after the other."""
    terms = {"resources": {"gpus": GPUS_EACH}, "lease": {"ttl_seconds": 600}}
    request = {"adhoc": True, "policy_rule_uri": POLICY, "inputs": {}, **terms}
    with connect(seeded.running.ws) as socket:

        def send_and_confirm(message: dict[str, Any]) -> dict[str, Any]:
            socket.send(json.dumps(message))
            answer: dict[str, Any] = json.loads(socket.recv(timeout=60))
            return answer

        held: list[dict[str, str]] = []
        for _ in range(CHANGES):
            held.append(send_and_confirm(request)["lease"])
            if len(held) > CHANGES // 4:
                lease = held.pop(0)
                send_and_confirm({"op": "release", "lease": lease["id"], "token": lease["token"]})


COUNTING = """each => {
    const {context} = each.painter;
    window.drawn = 0;
    const before = context.fillRect;
    context.fillRect = (...where) => { window.drawn++; before.apply(context, where); };
}"""


def test_ten_thousand_gpus_are_sent_once_and_then_only_changes_are_drawn(
    chromium: Any, large: Seeded
) -> None:
    sent: list[int] = []
    with open_page(chromium) as page:
        counting = ("framereceived", lambda data: sent.append(len(data)))
        page.on("websocket", lambda socket: socket.on(*counting))
        page.goto(f"{large.console}/fleet")
        agree(page, large)
        assert sum(sent) < BYTES_MAX
        page.get_by_role("img", name="Map of the fleet").evaluate(COUNTING)
        churn(large)
        agree(page, large)
        drawn = page.evaluate("() => window.drawn")
    changed = GPUS_EACH * (2 * CHANGES - CHANGES // 4)
    print(f"{drawn} rectangles for {changed} changes")
    assert drawn < 3 * changed + 3 * WHOLE, "not the whole map for each change"


MILLION = """async () => {
    const {read} = await import("/console/static/map/model.js");
    const {Painter, fitting} = await import("/console/static/map/draw.js");
    const nodes = 125000, slots = nodes * 8;
    const filled = (length, value) => Array.from({length}, value);
    const it = read({
        clusters: ["a", "b"], cluster_nodes: [100000, 25000],
        nodes: filled(nodes, (_, n) => "n" + n), devices: filled(nodes, () => 8),
        racks: [], rack: [], link: [], models: ["A100"], model: new Uint16Array(slots),
        states: ["free", "held"], state: filled(slots, (_, s) => s % 3 ? 1 : 0),
        milli: new Uint16Array(slots), tenants: [""], tenant: new Uint32Array(slots),
        ends: new Float64Array(slots),
    }, {number: 1, at: 0});
    const canvas = Object.assign(document.createElement("canvas"), {width: 1600, height: 900});
    const painter = new Painter(canvas);
    const layout = fitting(it, canvas.width, canvas.height);
    painter.fleet = it;
    painter.layout = layout;
    const calls = [];
    painter.context = new Proxy(painter.context, {
        get: (it, name) => typeof it[name] !== "function" ? it[name]
            : (...given) => { calls.push(name); return it[name](...given); },
        set: (it, name, value) => { it[name] = value; return true; },
    });
    painter.draw();
    return {calls, fits: layout.height <= 900, cell: layout.cell};
}"""


def test_a_million_slots_are_drawn_as_one_image(page: Any, console_server: Seeded) -> None:
    page.goto(f"{console_server.console}/operations")
    drawn = page.evaluate(MILLION)
    print(drawn)
    assert drawn["fits"]
    assert drawn["calls"].count("putImageData") == 1
    assert len(drawn["calls"]) < 20
