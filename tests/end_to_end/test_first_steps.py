"""Users who mistype ports and names in their first hour get errors that name the remedy."""

import pytest

pytestmark = pytest.mark.heavy  # A daemon.


def test_a_command_at_a_wrong_port_reports_the_error_in_one_sentence(server):
    ws, http = server.running.ws, server.running.http
    done = server.moorage("leases", "--url", http.replace("http:", "ws:"))
    assert done.returncode == 4
    port = ws.rpartition(":")[2]
    assert done.stderr.endswith(f": this port speaks HTTP; connect the WebSocket to port {port}\n")
    other = server.moorage("policy", "list", "--http-url", ws.replace("ws:", "http:"))
    assert "HTTP has a port of its own" in other.stderr


def test_moorage_login_at_a_server_without_an_issuer_explains_how_to_get_a_token(server, tmp_path):
    done = server.moorage("login", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "moored token create" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "--backend", "lokal", "--", "true"],
            "--backend: there is no “lokal” (did you",
        ),
        (["run", "--policy", "fist_fit:1.0-stable", "--", "true"], "Did you mean first_fit:1.0-"),
        (["run", "--cluster", "eats", "--", "true"], "(did you mean east?)"),
        (["fleet", "cordon", "eats"], "(did you mean east?)"),
        (["fleet", "cordon", "east-0"], "(did you mean node east/east-0?)"),
        (["fleet", "cordon", "west/east-0"], "(did you mean node east/east-0?)"),
        (["fleet", "east-0"], "(did you mean node east/east-0?)"),
        (["whatif", "--drain", "east-0"], "(did you mean node east/east-0?)"),
        (["leases", "--state", "grantd"], "(did you mean granted?)"),
        (["ask", "first_fit", "--topology", "racks"], "(did you mean rack?)"),
        (["ask", "first_fit", "--where", "node=east-0"], "(did you mean moorage/node?)"),
        (["fleet", "delete", "eats"], "(did you mean east?)"),
        (["policy", "logs", "fist_fit"], "(did you mean first_fit:1.0-stable?)"),
        (["policy", "activate", "fist_fit:1.0-stable"], "(did you mean first_fit:1.0-stable?)"),
        (["policy", "rollback", "firstfit"], "(did you mean first_fit:stable?)"),
        (["policy", "push", "best-fitt"], "did you mean best_fit?"),
        (["quota", "remove", "loca"], "(did you mean local?)"),
    ],
)
def test_the_error_about_a_misspelt_name_suggests_the_nearest_name(server, words, said):
    server.moorage("policy", "activate", "first_fit:1.0-stable", "--no-test")
    server.moorage("quota", "set", "local", "--gpus", "90")
    done = server.moorage(*words)
    assert said in done.stderr + done.stdout, done.stderr
