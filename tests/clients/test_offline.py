"""Tests of `moorage policy test` and `moorage policy backtest`, which need no server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

POLICY = """
from moorage.policy import best_rows, decline, propose, read_demand
import numpy as np

class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        self.settings = settings

    def eval(self, parameters, input_data, context):
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        scores = np.where(fleet.feasible(demand), parameters.get("score", 1), -1)
        return propose(fleet, demand, best_rows(fleet, demand, scores))
"""


def moorage(*words, expect=0, cwd=None):
    program = Path(sys.executable).with_name("moorage")
    command = [program, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.mark.heavy  # Runs all built-in requests twice.
def test_a_shipped_policy_is_found_by_name_unless_a_file_has_this_name(tmp_path):
    assert "best_fit:1.0-stable: passed" in moorage("policy", "test", "best_fit").stdout
    (tmp_path / "best_fit").mkdir()
    (tmp_path / "best_fit" / "function.py").write_text(POLICY)
    assert "best_fit:0-test: passed" in moorage("policy", "test", "best_fit", cwd=tmp_path).stdout


@pytest.mark.heavy
def test_a_policy_is_tried_from_a_file_and_its_verdict_is_the_exit_code(tmp_path):
    policy, requests = tmp_path / "my-rüle: 2.py", tmp_path / "requests.json"
    policy.write_text(POLICY)
    requests.write_text(json.dumps([{"resources": {"gpus": 1}, "lease": {"ttl_seconds": 9}}] * 3))
    done = moorage("policy", "test", policy, "--requests", requests, "--profile")
    assert "3 requests: 3 granted" in done.stdout
    assert "my-rüle: 2.py:13" in done.stdout
    assert done.stdout.endswith("my-rule-2:0-test: passed\n")
    policy.write_text(POLICY.replace("return propose(", "return (propose("))
    verdict = json.loads(moorage("policy", "test", policy, "--json", expect=6).stdout)
    assert verdict["passed"] is False
    assert "SyntaxError: '(' was never closed" in verdict["findings"][0]


@pytest.mark.heavy
def test_an_untestable_policy_is_a_usage_error(tmp_path):
    policy, broken = tmp_path / "rule.py", tmp_path / "broken.json"
    policy.write_text(POLICY)
    broken.write_text("[1")
    assert "is not JSON" in moorage("policy", "test", policy, "--requests", broken, expect=2).stderr
    broken.write_text('[{"resources": 1}]')
    done = moorage("policy", "test", policy, "--requests", broken, "--json", expect=2)
    assert "request 0: " in json.loads(done.stdout)["message"]
    nan = moorage("policy", "test", policy, "--parameters", '{"score": NaN}', expect=2)
    assert "NaN and Infinity are not JSON" in nan.stderr
    missing = moorage("policy", "test", tmp_path / "none.py", expect=2)
    assert "cannot read" in missing.stderr


@pytest.mark.heavy
def test_no_module_of_the_working_directory_is_run_outside_of_the_jail(tmp_path):
    for name in ("numpy", "random", "typing", "moorage"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run outside of the jail')\n")
    (tmp_path / "random.py").write_text(POLICY)
    (tmp_path / "requests.json").write_text('[{"resources": {"gpus": 1}}]')
    words = ("policy", "test", "random.py", "--requests", "requests.json")
    done = moorage(*words, cwd=tmp_path)
    assert done.stdout.endswith("random:0-test: passed\n")


def test_wrong_arguments_are_refused_before_a_policy_runs(shell, tmp_path):
    def refusal(*words):
        done = shell("policy", *map(str, words))
        assert done.returncode == 2
        return done.stderr

    said = refusal("test", "best_fitt")
    assert "no shipped policy 'best_fitt'; did you mean best_fit?" in said
    (tmp_path / "rule.py").write_text(POLICY)
    (tmp_path / "requests.json").write_text("[{}, 5, {}]")
    for option in ("--requests", "--clusters"):
        said = refusal("test", tmp_path / "rule.py", option, tmp_path / "requests.json")
        assert f"{option}: item 1 of " in said
    for words in (("--seed", 2**31), ("--sandbox", "none")):
        for command in (["test"], ["backtest", "--trace", "n.csv", "p.csv"]):
            assert words[0] in refusal(*command, tmp_path / "rule.py", *words)


@pytest.mark.heavy
def test_a_backtest_shows_policies_side_by_side(tmp_path):
    nodes, pods, mine = tmp_path / "nodes.csv", tmp_path / "pods.csv", tmp_path / "mine.py"
    rows = "".join(f"n{n},64000,262144,4,A100\n" for n in range(3))
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\n" + rows)
    rows = "".join(f"p{n},1000,1024,1,1000\n" for n in range(16))
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + rows)
    mine.write_text(POLICY)
    words = ("policy", "backtest", mine, "spread", "--trace", nodes, pods)
    results = json.loads(moorage(*words, "--json").stdout)
    first, second = results["rules"]
    assert (first["rule"], second["rule"]) == ("mine:0-test", "spread:1.0-stable")
    assert first["granted"] == second["granted"] == 12
    assert first["refusals"] == {"no_capacity": 3}
    assert first["allocation_percent"] == 100
    assert results["differing"][0]["placed_elsewhere"] > 0
    shown = moorage(*words).stdout
    assert "mine:0-test refused: 3 no_capacity" in shown
    assert "placed elsewhere" in shown
    coming = json.loads(moorage(*words, "--churn", "0.5", "--stays", "sized", "--json").stdout)
    assert coming["source"]["churn"] == {"load": 0.5, "stays": "sized"}
    assert "1 GPU" in moorage(*words, "--churn", "0.5").stdout
    assert "--churn" in moorage(*words, "--churn", "0.5", "--timed", expect=2).stderr
    assert "--ledger" in moorage("policy", "backtest", mine, expect=2).stderr
    assert (
        "no file no/rule.py"
        in moorage("policy", "backtest", "no/rule.py", *words[4:], expect=2).stderr
    )
    missing = moorage("policy", "backtest", "mine", *words[4:], expect=2).stderr
    assert "no shipped policy 'mine'" in missing
    assert "mine:stable" in missing
    assert "plots are" in moorage(*words, "--plot", "x.pdf", expect=2).stderr
