"""The TypeScript client compiles, and talks with a real daemon from Node."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from moorage.daemon.access.token_store import TokenStore
from moorage.records.rights import Role
from moorage.storage.opening import open_storage
from moorage.testing.daemon_process import daemon
from moorage_client.services import Services
from moorage_policies import catalog
from tests.clients.conftest import Harbour

SOURCE = Path(__file__).parents[2] / "clients" / "typescript"
PROGRAM = """
import { ConnectionLost, MoorageClient, NotLetIn, Refused } from "./dist/client.js";

const known = { method: "POST", headers: { Authorization: "Bearer s3cret~?" } };
const { ticket } = (await (await fetch(`${process.env.HTTP}/websocket-ticket`, known)).json()).data;
const once = await MoorageClient.connect(process.env.URL, { ticket });
once.close();
const again = MoorageClient.connect(process.env.URL, { ticket });
const out = await again.then(() => "in", () => "out");
for (const credential of [undefined, null, { token: "wrong" }]) {
  const why = await MoorageClient.connect(process.env.URL, credential).catch((no) => no);
  console.log(why instanceof NotLetIn, why.message.replace(process.env.URL, "URL"));
}
const nowhere = await MoorageClient.connect("ws://127.0.0.1:9").catch((no) => no);
console.log(nowhere instanceof ConnectionLost, nowhere.message);
const client = await MoorageClient.connect(process.env.URL, { token: "s3cret~?" });
const news = [];
client.onNews = (each) => news.push(each.event);
await client.ask("watch", { topics: ["leases"] });
const wanted = { policy_rule_uri: "first_fit:1.0-stable", inputs: {}, resources: { gpus: 1 } };
const { lease } = await client.ask("allocate", { ...wanted, lease: { ttl_seconds: 60 } });
const more = client.ask("allocate", { ...wanted, resources: { gpus: 2 } });
const code = await more.then(() => "served", (no) => (no instanceof Refused ? no.code : "lost"));
const [listed, fleet] = await Promise.all([client.ask("leases", {}), client.ask("fleet", {})]);
await client.ask("release", { lease: lease.id, token: lease.token });
const free = fleet.data.clusters[0].gpu_milli_free;
console.log(out);
console.log(JSON.stringify([lease.placement[0].node_id, code, listed.data.leases.length, free]));
client.close();
console.log(news.includes("granted"));
"""


pytestmark = pytest.mark.heavy

MACHINE = {
    "id": "n0",
    "vcpus": {"count": 8},
    "memory": 1024,
    "gpus": {"count": 1, "gpus": [{"modelName": "A100", "memory": 40_960}]},
}

FOLLOWING = """
import { ConnectionLost, MoorageClient } from "./dist/client.js";

const client = await MoorageClient.connect(process.env.URLS);
const news = [];
client.onNews = (each) => news.push(each.event);
await client.ask("watch", { topics: ["leases"] });
const wanted = { policy_rule_uri: "slow:1-x", inputs: {}, lease: { ttl_seconds: 60 } };
const poke = { policy_rule_uri: "first:1-x", action: "poke", data: {} };
const poked = client.ask("manage", poke).catch((no) => no);
const { lease } = await client.ask("allocate", wanted);
console.log(lease.id, client.url === process.env.LAST, (await poked) instanceof ConnectionLost);
console.log(news.join());
client.close();
const lost = await client.ask("fleet", {}).catch((no) => no);
console.log(lost instanceof ConnectionLost);
"""
FLAPPING = """
import { MoorageClient } from "./dist/client.js";

const options = { reconnectSeconds: 1 };
const client = await MoorageClient.connect(process.env.URLS.split(","), undefined, options);
const wanted = { policy_rule_uri: "first:1-x", inputs: {}, lease: {} };
const no = await client.ask("allocate", wanted).catch((no) => no);
console.log(no.message.replaceAll(/ws:..127.0.0.1:/g, ""));
client.close();
"""


PAUSES = """
const pauses = [];
const timer = globalThis.setTimeout;
globalThis.setTimeout = (work, ms) => (Number.isInteger(ms) || pauses.push(ms), timer(work, ms));
"""
"""A script that counts the pauses between attempts: only they are fractions of milliseconds."""
STOPPING = f"""{PAUSES}
import {{ MoorageClient }} from "./dist/client.js";

const client = await MoorageClient.connect(process.env.URLS);
const lease = {{ ttl_seconds: 60 }};
for (const rule of ["first:1-x", "slow:1-x"]) {{
  const reply = await client.ask("allocate", {{ policy_rule_uri: rule, inputs: {{}}, lease }});
  console.log(reply.lease.id, client.url === process.env.LAST, pauses.length);
}}
client.close();
"""
HANDED_OVER = """
import { MoorageClient } from "./dist/client.js";

const client = await MoorageClient.connect(process.env.URLS);
const terms = { resources: { cpu_milli: 1 }, lease: { ttl_seconds: 60 } };
const wanted = { policy_rule_uri: "first_fit:1.0-stable", inputs: {}, ...terms };
const fencing = new Set();
for (let after = 0; after < 20; ) {
  fencing.add((await client.ask("allocate", wanted)).lease.fencing);
  console.log("granted");
  if (client.url === process.env.LAST) after++;
}
client.close();
console.log(fencing.size);
"""


RENEWING = """
import { readFileSync } from "node:fs";
import { MoorageClient } from "./dist/client.js";

const token = async () => readFileSync(process.env.FILE, "utf8");
const client = await MoorageClient.connect(process.env.URL, { token });
client.onNews = async ({ event }) => {
  console.log(event);
  if (event === "reconnected") console.log((await client.ask("leases", {})).data.leases.length);
  if (event === "lost") client.close();
};
await client.ask("watch", { topics: ["fleet"] });
console.log("open");
"""


@pytest.fixture(scope="module")
def client_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TypeScript client, compiled in a separate folder."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node here: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("typescript")
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    quiet = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(quiet, cwd=folder, check=True, timeout=300)
    subprocess.run(["npm", "run", "build"], cwd=folder, check=True, timeout=120)
    return folder


def start_program(folder: Path, program: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "program.mjs").write_text(program)
    return subprocess.Popen(
        ["node", "--experimental-websocket", "--no-warnings", "program.mjs"],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_typescript_client_finds_the_leader_and_repeats_no_request(
    client_folder: Path, harbour: Harbour, other: Harbour
) -> None:
    other.standby, other.leader = True, harbour.url
    harbour.mute.add("manage")
    urls = f"ws://127.0.0.1:9, {other.url},{harbour.url}"
    with start_program(client_folder, FOLLOWING, URLS=urls, LAST=other.url) as node:
        harbour.wait_for(lambda: harbour.count("ask") == harbour.count("manage") == 1)
        harbour.stop()
        other.take_over(harbour)
        other.gate.set()
        said, _ = node.communicate(timeout=60)
    granted, events, resumed = said.splitlines()
    assert (granted, resumed) == ("l-1 true true", "true"), said
    assert {*events.split(",")} == {"reconnected"}, "several if it meets the standby first"
    asks = [each for at in (harbour, other) for each in at.heard if "op" not in each]
    assert len({each["lease"]["idempotency_key"] for each in asks}) == 1
    assert other.count("manage") == 1, "the standby refused this call"


def test_the_typescript_client_changes_servers_at_once_when_one_stops(
    client_folder: Path, harbour: Harbour, other: Harbour
) -> None:
    """The first server refuses because it stops; the second one closes its sockets with 1012."""
    harbour.refusals["first:1-x"] = {"code": "shutting_down", "reason": "It stops."}
    with start_program(
        client_folder, STOPPING, URLS=f"{harbour.url},{other.url}", LAST=other.url
    ) as node:
        other.wait_for(lambda: other.count("ask") == 2)
        harbour.take_over(other)
        harbour.gate.set()
        other.stop()
        said, _ = node.communicate(timeout=60)
    assert said == "l-1 true 0\nl-2 false 0\n"


def test_the_typescript_client_continues_at_the_standby_that_takes_over(
    client_folder: Path, postgres, tmp_path: Path
) -> None:
    shared = {"MOORAGE_STORAGE": postgres.database()}
    with (
        daemon(tmp_path / "a", environment=shared) as first,
        daemon(tmp_path / "b", environment=shared) as second,
        Services(first.http) as services,
    ):
        services.put_cluster({"id": "lab", "nodes": {"nodeData": [MACHINE]}})
        services.publish_policy(catalog.document("first_fit"))
        with start_program(
            client_folder, HANDED_OVER, URLS=f"{second.ws},{first.ws}", LAST=second.ws
        ) as node:
            assert node.stdout is not None
            assert [node.stdout.readline() for _ in range(10)] == ["granted\n"] * 10
            os.kill(first.pid, signal.SIGTERM)
            said, _ = node.communicate(timeout=60)
    *granted, different = said.splitlines()
    assert {*granted} == {"granted"}, said
    assert int(different) == len(granted) + 10


def test_standbys_that_name_each_other_as_leader_cause_an_error(
    client_folder: Path, harbour: Harbour, other: Harbour
) -> None:
    harbour.standby, harbour.leader = True, other.url
    other.standby, other.leader = True, harbour.url
    with start_program(client_folder, FLAPPING, URLS=f"{harbour.url},{other.url}") as node:
        said, _ = node.communicate(timeout=60)
    assert said.startswith("none of 2 addresses serves: "), said
    assert f"{other.port}: is a standby, and names {harbour.port}" in said
    assert harbour.count("ask") + other.count("ask") < 30


def test_the_typescript_client_refreshes_its_token(client_folder: Path, tmp_path: Path) -> None:
    file, data, now = tmp_path / "token", tmp_path / "data", time.time()
    data.mkdir()
    store = TokenStore(open_storage("", data).tokens())
    first, second = (store.create(each, Role.CLIENT, "ann", now, None) for each in ("a", "b"))
    file.write_text(first)
    with (
        contextlib.closing(store),
        daemon(data) as running,
        start_program(client_folder, RENEWING, URL=running.ws, FILE=str(file)) as node,
    ):
        assert node.stdout is not None
        assert node.stdout.readline() == "open\n"
        file.write_text(second)
        store.revoke("a", time.time())
        assert [node.stdout.readline() for _ in range(2)] == ["reconnected\n", "0\n"]
        store.revoke("b", time.time())
        said, _ = node.communicate(timeout=60)
    assert said == "lost\n"


def test_the_typescript_client_talks_with_a_daemon(client_folder: Path) -> None:
    with daemon(environment={"MOORAGE_TOKENS": "ann:s3cret~?"}) as running:
        url = running.http
        known = {"Authorization": "Bearer s3cret~?"}
        cluster = {"id": "lab", "nodes": {"nodeData": [MACHINE]}}
        httpx.post(f"{url}/clusters", json=cluster, headers=known).raise_for_status()
        document = catalog.document("first_fit")
        httpx.post(f"{url}/policy", json=document, headers=known, timeout=60).raise_for_status()
        with start_program(client_folder, PROGRAM, URL=running.ws, HTTP=running.http) as node:
            said, _ = node.communicate(timeout=60)
    assert said.splitlines() == [
        *["true the server at URL needs a token: give connect() { token } or { ticket }"] * 2,
        "true the server at URL refuses this token",
        "true nothing answers at ws://127.0.0.1:9",
        "out",
        '["n0","never_fits",1,0]',
        "true",
    ]
