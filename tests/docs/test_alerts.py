"""Alert rules, the dashboard and their page agree with the metrics of a server."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import reference
import yaml

from moorage.testing.daemon_process import daemon

ALERTS = reference.ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = reference.ROOT / "deploy" / "grafana" / "moorage.json"
PAGE = reference.DOCS / "how-to" / "read-alerts.md"
METRIC = re.compile(r"moorage_\w+")


@pytest.fixture(scope="module")
def text() -> str:
    """The metrics page of a new server."""
    with daemon() as running:
        return httpx.get(f"{running.http}/metrics").text


@pytest.fixture(scope="module")
def metric_names(text: str) -> set[str]:
    """Return the names of a new server's metrics, three for each histogram."""
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    return names | {f"{name}_{part}" for name in names for part in ("bucket", "count", "sum")}


def rules() -> list[dict]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_alerts_and_charts_is_served(metric_names: set[str]) -> None:
    used = {
        name
        for each in [*expressions(), *(r["expr"] for r in rules())]
        for name in METRIC.findall(each)
    }
    assert len(used) > 15
    assert used - metric_names == set()


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules()]
    for rule in rules():
        place = f"docs/how-to/read-alerts.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == place
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]


def test_panels_lie_side_by_side_and_name_their_series() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels]
    assert len(set(places)) == len(places)
    assert all(target["legendFormat"] for each in panels for target in each["targets"])


@pytest.mark.heavy
def test_promtool_finds_no_fault_in_alerts_charts_and_metrics(tmp_path: Path, text: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here; on Debian: apt-get install prometheus")
    charts = [
        {"record": f"chart:{n}", "expr": re.sub(r"\$__rate_interval", "5m", each)}
        for n, each in enumerate(expressions())
    ]
    file = tmp_path / "charts.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "charts", "rules": charts}]}))
    for each in (ALERTS, file):
        checked = subprocess.run(
            ["promtool", "check", "rules", each], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
    command = ["promtool", "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.heavy
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here; on Debian: apt-get install prometheus")
    full = 'moorage_disk_full{instance="a", job="moorage"}'
    slow = 'moorage_commit_seconds_bucket{instance="a", le="%s"}'
    nodes = 'moorage_nodes%s{instance="a", job="moorage"}'
    cases = [
        {
            "interval": "1m",
            "input_series": [
                {"series": 'up{instance="a", job="moorage"}', "values": "1 0x20"},
                {"series": full, "values": "0x5 1x20"},
                {"series": slow % "0.1", "values": "0+0x30"},
                {"series": slow % "1.0", "values": "0+100x30"},
                {"series": slow % "+Inf", "values": "0+100x30"},
                {"series": nodes % "", "values": "50x30"},
                {"series": nodes % "_unavailable", "values": "5x5 6x20"},
            ],
            "alert_rule_test": [
                expectation("1m", "MoorageDown"),
                expectation("10m", "MoorageDown", "page", "a does not answer", job="moorage"),
                expectation(
                    "10m",
                    "MoorageDiskFull",
                    "page",
                    "The disk of a is full: it grants no leases",
                    job="moorage",
                ),
                expectation(
                    "25m",
                    "MoorageCommitSlow",
                    "ticket",
                    "One of 100 commits on a takes more than 250 ms",
                ),
                expectation("20m", "MoorageNodesOut"),
                expectation(
                    "25m",
                    "MoorageNodesOut",
                    "ticket",
                    "6 nodes of a accept no new leases",
                    job="moorage",
                ),
            ],
        },
        *cases_of_leaders(),
        case_of_an_entrance(),
        case_of_circuits(),
        case_of_refusals(),
        case_of_waits(),
    ]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": cases}))
    tested = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def cases_of_leaders() -> list[dict]:
    """Return the cases: a standby takes over, two servers stand by, and all targets are gone."""
    up = 'up{instance="%s", job="moorage"}'
    role = 'moorage_server_role{instance="%s", job="moorage", role="writer"}'
    behind = 'moorage_standby_behind_seconds{instance="b", job="moorage"}'
    led = [(up % "a", "1x10 _x60"), (role % "a", "1x10 _x60"), (up % "b", "1x70")]
    taken = [*led, (role % "b", "0x10 1x60"), (behind, "0x10 _x60")]
    vacant = [*led, (role % "b", "0x70"), (behind, "0x10 40x60")]
    gone = [(up % "a", "1x10 _x60"), (role % "a", "1x10 _x60")]
    no_leader = ("MoorageNoLeader", "page", "No server leads, so no request is granted")
    absent = "Prometheus knows no server whose metrics it could read"
    lags = "The standby b does not know the facts of the last 40 seconds"
    expected = [
        [expectation("40m", name) for name in ("MoorageNoLeader", "MoorageMetricsAbsent")],
        [
            expectation("9m", "MoorageNoLeader"),
            expectation("40m", *no_leader, instance=""),
            expectation("40m", "MoorageMetricsAbsent"),
            expectation("9m", "MoorageStandbyLags"),
            expectation("40m", "MoorageStandbyLags", "ticket", lags, instance="b", job="moorage"),
        ],
        [
            expectation("9m", "MoorageMetricsAbsent"),
            expectation("40m", *no_leader, instance=""),
            expectation(
                "40m", "MoorageMetricsAbsent", "ticket", absent, instance="", job="moorage"
            ),
        ],
    ]
    return [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series],
            "alert_rule_test": expectations,
        }
        for series, expectations in zip((taken, vacant, gone), expected, strict=True)
    ]


def case_of_an_entrance() -> dict:
    """Return the case of an old certificate, of failed logins, and of an issuer that is down."""
    of_a = '{instance="a", job="moorage"}'
    expires_b = 'moorage_certificate_expires_seconds{instance="b", job="moorage"}'  # For a day.
    days = 86_400
    soon = "The certificate of a expires in less than 14 days"
    surge = "More than one login a second fails on a"
    unwritten = "a cannot write its audit log"
    keys = "a cannot fetch the keys of its issuer"
    return {
        "interval": "1m",
        "input_series": [
            {
                "series": f"moorage_certificate_expires_seconds{of_a}",
                "values": f"{15 * days}x20 {13 * days}x30",
            },
            {"series": f"moorage_certificate_lifetime_seconds{of_a}", "values": f"{90 * days}x50"},
            {"series": expires_b, "values": f"{days // 3}x50"},
            {"series": expires_b.replace("expires", "lifetime"), "values": f"{days}x50"},
            {
                "series": 'moorage_failed_logins_total{instance="a", door="http"}',
                "values": "0+30x20 600+90x30",
            },
            {"series": f"moorage_oidc_keys_up{of_a}", "values": "1x20 0x30"},
            {"series": f"moorage_audit_waiting_seconds{of_a}", "values": "0x15 0+60x30"},
        ],
        "alert_rule_test": [
            expectation("20m", "MoorageCertificateExpires"),
            expectation("40m", "MoorageCertificateExpires", "ticket", soon, job="moorage"),
            expectation("20m", "MoorageLoginsFail"),
            expectation("40m", "MoorageLoginsFail", "ticket", surge),
            expectation("20m", "MoorageIssuerFails"),
            expectation("40m", "MoorageIssuerFails", "ticket", keys, job="moorage"),
            expectation("20m", "MoorageAuditWaits"),
            expectation("40m", "MoorageAuditWaits", "page", unwritten, job="moorage"),
        ],
    }


def case_of_circuits() -> dict:
    """Return the case of a circuit that opens again and again, and of one that opens once."""
    series = 'moorage_policies_circuit_open{instance="%s", job="moorage"}'
    again = " ".join(["0", *(["1", "1", "0"] * 30)])
    return {
        "interval": "15s",
        "input_series": [
            {"series": series % "a", "values": again},
            {"series": series % "b", "values": "0 1 1 0x90"},
        ],
        "alert_rule_test": [
            expectation("4m", "MooragePolicyRests"),
            *(
                expectation(
                    at,
                    "MooragePolicyRests",
                    "ticket",
                    "The circuit breakers of 1 policies on a are open",
                    job="moorage",
                )
                for at in ("6m", "20m")
            ),
        ],
    }


def case_of_refusals() -> dict:
    """Return the case of a policy that crashes, and of policies that find no place."""
    series = 'moorage_refusals_total{instance="%s", job="moorage", code="policy_%s"}'
    fails = "Policies on a fail with policy_crashed"
    return {
        "interval": "1m",
        "input_series": [
            {"series": series % (instance, code), "values": "0+60x60"}
            for instance, code in (("a", "crashed"), ("a", "declined"), ("b", "declined"))
        ],
        "alert_rule_test": [
            expectation("40m", "MooragePolicyFails", "ticket", fails, code="policy_crashed")
        ],
    }


def case_of_waits() -> dict:
    """Return the case of a request that is never granted: GPUs are free on a, but few on b."""
    wait = "Requests on a wait over an hour although GPUs are free"
    values = {
        "moorage_wait_seconds_bucket": "0x120",
        "moorage_oldest_wait_seconds": "0+60x120",
        "moorage_gpu_milli_total": "100000x120",
    }
    series = [
        *((name, instance, values[name]) for name in values for instance in "ab"),
        ("moorage_gpu_milli_free", "a", "20000x120"),
        ("moorage_gpu_milli_free", "b", "9000x120"),
    ]
    return {
        "interval": "1m",
        "input_series": [
            {"series": f'{name}{{instance="{instance}", job="moorage"}}', "values": each}
            for name, instance, each in series
        ],
        "alert_rule_test": [
            expectation("80m", "MoorageWaitLong"),
            expectation("100m", "MoorageWaitLong", "ticket", wait),
        ],
    }


def expectation(at: str, alert: str, severity: str = "", summary: str = "", **labels: str) -> dict:
    """Return promtool's expectation of an alert at a time; without a severity, no alert."""
    if not severity:
        return {"eval_time": at, "alertname": alert, "exp_alerts": []}
    known = {"severity": severity, "instance": "a", **labels}
    runbook = f"docs/how-to/read-alerts.md#{alert.lower()}"
    return {
        "eval_time": at,
        "alertname": alert,
        "exp_alerts": [
            {
                "exp_labels": {name: value for name, value in known.items() if value},
                "exp_annotations": {"summary": summary, "runbook": runbook},
            }
        ],
    }
