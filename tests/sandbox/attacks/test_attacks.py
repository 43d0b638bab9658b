"""Hostile policies in real cells try each attack class of the sandbox."""

# ruff: noqa: ASYNC240, S108, PTH115  # The outside is looked at with plain file calls.

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.model import PolicyRef, Tenant
from moorage.sandbox.host.sandbox import Limits, PolicyCode


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
_load(HERE / "payloads.py")  # The other two files import it by this name.
PAYLOADS = (
    *_load(HERE / "payloads_outside.py").PAYLOADS,
    *_load(HERE / "payloads_inside.py").PAYLOADS,
)
bench_module = _load(HERE.parent / "conftest.py")

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "BREACH-SECRET-VALUE"  # noqa: S105  # No cell may see it.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(tmp_path_factory):
    """A sandbox for all attacks, which each attack must leave unchanged."""
    folder = tmp_path_factory.mktemp("outside")
    sentinel = folder / "sentinel"
    sentinel.write_text(SECRET)
    folder.chmod(0o777)
    sentinel.chmod(0o666)
    os.environ["MOORAGE_TEST_SECRET"] = SECRET
    limits = Limits(evaluation_seconds=1.0, load_seconds=2.0, memory_mib=128, spares=2)
    bench = bench_module.Bench(limits=limits)
    await bench.sandbox.start()
    bench.sentinel = sentinel
    bench.zygote = bench.sandbox._pool.spawner._zygote.pid
    bench.bystander = bench.first_fit()
    await bench.value(bench.bystander)
    yield bench
    await bench.sandbox.close()
    del os.environ["MOORAGE_TEST_SECRET"]
    assert not bench.twice


def _families(zygote: int) -> set[int]:
    """Return processes with a wrong parent; cells have no children."""
    strangers = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parent = int(fields[1])
            if parent > 1 and _parent(parent) == zygote:
                strangers.add(int(entry.name))
    return strangers


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


@pytest.mark.parametrize("payload", PAYLOADS, ids=[f"{p.number:02}-{p.name}" for p in PAYLOADS])
async def test_each_attack_from_the_list_fails(arena, payload):
    code = PolicyCode(
        PolicyRef(f"attack.{payload.name}:1-x", f"{payload.number} {payload.name}"),
        {"function.py": payload.source},
    )
    inputs = {"sentinel": str(arena.sentinel), "host": os.getpid()}
    # Attacks that never end get half of the time of others.
    endless = payload.ends == {"policy_timeout"}
    attack = arena.ask(code, inputs, deadline_seconds=0.5 if endless else 0.0)
    during = arena.ask(arena.bystander)
    outcome = await attack
    if isinstance(outcome, Proposed):
        end, notes = "value", []
        if isinstance(outcome.value, dict):
            notes = outcome.value.get("breach", [])
        assert notes == []
        assert SECRET not in repr(outcome.value)
    else:
        end = str(outcome.refusal.code)
        assert SECRET not in repr(outcome.refusal)
        assert len(outcome.refusal.reason) < 1200
    assert end in payload.ends, outcome
    # Another policy is served during the attack and after it.
    assert (await during).value["cluster_id"] == "c0"
    assert (await arena.value(arena.bystander))["cluster_id"] == "c0"
    # An honest caller of the hostile policy is served, too: no forged answer remains for it.
    # If the attacker still writes when that caller's turn begins, the caller gets one refusal.
    honest = await arena.outcome(code, {"honest": True})
    if isinstance(honest, ConsultFailed):
        assert (payload.number, honest.refusal.code) == (71, "policy_crashed")
        honest = await arena.outcome(code, {"honest": True})
    assert honest.value == {"honest": True}
    # Seen from outside: nothing was read, written, created, started or killed.
    assert arena.sentinel.read_text() == SECRET
    assert [path.name for path in arena.sentinel.parent.iterdir()] == ["sentinel"]
    assert arena.sentinel.stat().st_mode & 0o777 == 0o666
    assert not Path("/dev/shm/breach").exists()
    assert arena.sandbox._pool.spawner._zygote.pid == arena.zygote
    assert arena.sandbox.report().counters.get("zygote_restarts", 0) == 0
    assert _families(arena.zygote) == set()
    assert all(len(text) <= 64 << 10 for text in arena.sandbox._output.values())


async def test_forged_ids_never_reach_a_service(arena):
    client = "self.settings['cluster_client'].read_cluster"
    code = arena.policy(f"return [{client}('c0'), {client}('../../admin')]", "ids")
    (good, _), (bad, text) = await arena.value(code)
    assert (good, bad) == (True, False)
    assert "expected a cluster id" in text
    assert arena.registry.calls
    for client, method, arguments in arena.registry.calls:
        assert (client, method, arguments) == ("cluster_client", "read_cluster", ("c0",))


SPEAK = """
import os, sys, time, msgspec
from moorage.sandbox.wire import frames
nonce = sys._getframe(1).f_locals["frame"].nonce
def send(frame):
    data = frames.pack(frame)
    while data: data = data[os.write(3, data):]
def receive():
    body = b""
    size = int.from_bytes(os.read(3, 4), "little")
    while len(body) < size: body += os.read(3, size - len(body))
    return frames.decode_to_cell(body)
"""
"""The beginning of policies that write to the channel themselves."""


async def test_each_document_is_sent_to_a_cell_only_once(arena):
    code = arena.policy(
        SPEAK + "send(frames.Want(nonce, ('c0',) * 500 + tuple(f'no{n}' for n in range(500))))\n"
        "return list(receive().items)",
        "wants",
    )
    arena.registry.fetched.clear()
    assert await arena.value(code) == ["c0"]
    assert arena.registry.fetched == ["c0"]
    (cell,) = [c for c in arena.sandbox._pool._group_of if c.code.ref == code.ref]
    # Unknown names are not remembered.
    assert cell._sync._cached == {"documents": {"c0"}}


async def test_a_document_of_a_cluster_outside_of_the_fleet_is_sent_alone(arena):
    wants = "send(frames.Want(nonce, ('c0',)))\nreturn list(receive().items)"
    code = arena.policy(SPEAK + wants, "beside")
    arena.registry.fetched.clear()
    plain = arena.sandbox.evaluate(code, Tenant("t"), {}, parameters={}, settings={})
    assert await plain == ["c0"]
    assert arena.registry.fetched == ["c0"]


async def test_a_request_for_more_documents_than_exist_ends_the_cell(arena):
    wants = "send(frames.Want(nonce, tuple(f'no{n}' for n in range(5000))))\ntime.sleep(60)"
    refusal = await arena.refusal(arena.policy(SPEAK + wants, "flood"))
    assert refusal.code == "policy_crashed"
    assert "5000 documents" in refusal.reason


async def test_a_cell_that_does_not_read_its_answers_gets_no_more_answers(arena):
    calls = (
        "packed = msgspec.msgpack.encode([{'q': 'x' * 60_000}])\n"
        "for _ in range(60):\n"
        "    send(frames.Call(nonce, 'cluster_client', 'execute_query', packed))\n"
        "    time.sleep(0.003)\n"
        "time.sleep(60)"
    )
    before = len(arena.registry.calls)
    refusal = await arena.refusal(arena.policy(SPEAK + calls, "deaf"))
    assert refusal.code == "policy_crashed"
    assert "a second question before" in refusal.reason
    assert len(arena.registry.calls) - before < 60


async def test_cells_have_only_their_channel_open_and_run_under_the_filter_of_system_calls(arena):
    # A spare cell that is still starting has no jail yet.
    await asyncio.gather(*arena.sandbox._pool.spawner._ready.values(), return_exceptions=True)
    assert arena.sandbox._pool.spawner.living
    for pid in list(arena.sandbox._pool.spawner.living):
        status = Path(f"/proc/{pid}/status").read_text()
        assert "Seccomp:\t2" in status
        assert "NoNewPrivs:\t1" in status
        assert "CapEff:\t0000000000000000" in status
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
        if os.getuid() == 0:
            fds = sorted(Path(f"/proc/{pid}/fd").iterdir())
            assert [fd.name for fd in fds] == ["0", "1", "2", "3"]
            assert {os.readlink(fd) for fd in fds[:3]} == {"/dev/null"}


@pytest.mark.parametrize("name", ["../../breach.py", "/tmp/breach.py", "..\\breach.py"])
async def test_file_names_of_an_archive_are_never_paths(arena, name):  # Class 11.
    policy = arena.policy("return {'fine': True}", "traversal")
    code = PolicyCode(PolicyRef("traversal:1-x", name), {**policy.files, name: b"raise SystemExit"})
    assert await arena.value(code) == {"fine": True}
    assert not Path("/tmp/breach.py").exists()


@pytest.mark.heavy
@pytest.mark.parametrize(
    "source",
    [
        b"while True: pass",
        b"import os; os._exit(1)",
        b"raise SystemExit",
        b"x = '",
        b"\x00\xff\xfe",
        b"(" * 100_000,
        b"x = [0] * (1 << 40)",
        b"class AIOSv1PolicyRule: pass",
        b"",
    ],
    ids=["loop", "exit", "system_exit", "syntax", "binary", "parens", "memory", "empty", "none"],
)
async def test_code_that_attacks_while_a_cell_loads_it_is_refused(arena, source):
    code = PolicyCode(PolicyRef("loading:1-x", repr(source[:40])), {"function.py": source})
    refusal = await arena.refusal(code)
    assert refusal.code in {"bad_policy", "policy_timeout", "policy_crashed"}
    result = await arena.sandbox.check(code)
    assert not result.ok
    assert (await arena.value(arena.bystander))["cluster_id"] == "c0"


async def test_forged_findings_are_truncated(arena):
    source = (
        "import os\nfrom moorage.sandbox.wire import frames\n"
        "fault = frames.CodeFinding('m' * 3000, 'f' * 3000, 1, 1, 't' * 3000)\n"
        "data = frames.pack(frames.PolicyLoaded((fault,) * 200, True, 'o'))\n"
        "while data: data = data[os.write(3, data):]\n"
    )
    code = PolicyCode(PolicyRef("forged:1-x", "forged"), {"function.py": source.encode()})
    result = await arena.sandbox.check(code)
    assert {finding.message.strip("m") for finding in result.findings} == {""}
    assert len(repr(result.findings)) < 100_000
