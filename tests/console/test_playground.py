"""The playground runs a policy in the jail, on the present fleet, another fleet, or a trace."""

import json
from typing import Any

import pytest
from consoles import Seeded

from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # A browser.

CODE = catalog.document("first_fit")["code"].replace(
    "        scores =", '        print("wants", demand.gpus)\n        scores ='
)
TRACE = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + "".join(
    f"pod-{n},1000,1000,{n % 4 + 1},1000\n" for n in range(12)
)


@pytest.fixture
def playground(page: Any, console_server: Seeded) -> Any:
    page.goto(f"{console_server.console}/playground")
    page.get_by_label("Policy (Python)").fill(CODE)
    return page


def run(page: Any, *gpus: int) -> Any:
    requests = [{"inputs": {}, "resources": {"gpus": each}} for each in gpus]
    page.get_by_label("Requests (JSON list)").fill(json.dumps(requests))
    page.get_by_role("button", name="Run", exact=True).click()
    return page.get_by_role("table", name="Results")


def test_a_trial_in_the_playground_shows_placements_and_prints_and_refusals_and_times(
    playground: Any,
) -> None:
    rows = run(playground, 1, 8, 9).get_by_role("row")
    rows.nth(3).wait_for()
    first, second, third = rows.all_inner_texts()[1:]
    for words, row in (("placed east/east-n ms", first), ("placed", second), ("never_fits", third)):
        assert all(word in row for word in words.split())
    prints = playground.get_by_role("region", name="What it printed").inner_text()
    assert "wants 1" in prints
    playground.get_by_text("On 40 nodes with 320 GPUs").wait_for()


def test_the_playground_shows_a_mistake_with_its_line(playground: Any) -> None:
    playground.get_by_label("Policy (Python)").fill("def broken(:\n")
    playground.get_by_role("button", name="Run", exact=True).click()
    alert = playground.get_by_role("alert")
    alert.wait_for()
    assert "line 1" in alert.inner_text()
    playground.get_by_label("Policy (Python)").fill(CODE)
    playground.get_by_label("Requests (JSON list)").fill("[")
    playground.get_by_role("button", name="Run", exact=True).click()
    playground.get_by_text("The requests are not valid JSON.").wait_for()


def test_the_playground_tries_a_policy_on_an_uploaded_fleet(playground: Any) -> None:
    device = {"id": "0", "modelName": "A100", "memory": 80_000}
    node = {"id": "mine", "gpus": {"count": 1, "gpus": [device]}, "vcpus": {"count": 8}}
    nodes = {"count": 1, "nodeData": [node | {"memory": 64_000}]}
    playground.get_by_role("radio", name="uploaded").check()
    documents = json.dumps([{"id": "lab", "nodes": nodes}])
    playground.get_by_label("Cluster documents (JSON)").fill(documents)
    rows = run(playground, 1, 1).get_by_role("row")
    rows.nth(2).wait_for()
    first, second = rows.all_inner_texts()[1:]
    assert "lab/mine GPU 0" in first
    assert "refused" in second


def test_a_backtest_in_the_playground_draws_its_curve(playground: Any) -> None:
    playground.get_by_text("Backtest on a trace").click()
    playground.get_by_label("Trace (CSV").fill(TRACE)
    playground.get_by_role("button", name="Backtest", exact=True).click()
    playground.get_by_role("img", name="Allocated against demanded").wait_for()
    playground.get_by_text("The figures").click()
    table = playground.get_by_role("table", name="Allocated against demanded")
    assert table.get_by_role("row").count() > 2
