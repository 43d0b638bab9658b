"""Tests that the resource engine behaves as its documents say, under races and failures, too."""

import asyncio
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from moorage.backends.kubernetes.specs import PodServiceResourceSpec
from moorage.backends.ray.specs import RayJobResourceSpec
from moorage.backends.spec_documents import SPECS, pool_key
from moorage.backends.specs import (
    ContainerResourceSpec,
    LocalEnvResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
    SpecError,
    VLLMModelResourceSpec,
)
from moorage.resources import (
    BackendError,
    BaseResource,
    BaseResourceSpec,
    Context,
    EngineClosedError,
    ResourceEngine,
    ResourceStatus,
    store,
)
from moorage.resources.resources import plain


@dataclass(kw_only=True)
class Spec(BaseResourceSpec):
    category: str = "thing"
    colour: str = "red"


ALONE = Spec(max_global_num=1)
"""A spec with a cap of one resource."""


class Thing(BaseResource):
    def __init__(self, name: str, spec: Spec) -> None:
        self.name = name
        self.spec = spec
        self.status = ResourceStatus.RUNNING
        self.resets: list[Any] = []
        self.reset_error: Exception | None = None

    @property
    def resource_id(self) -> str:
        return self.name

    @property
    def category(self) -> str:
        return "thing"

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        if self.reset_error is not None:
            raise self.reset_error
        self.resets.append((args, kwargs))
        return "fresh"

    async def get_status(self) -> ResourceStatus:
        return self.status

    async def control(self, **kwargs: Any) -> None:
        if kwargs != {"cpu_count": 2}:
            await super().control(**kwargs)

    async def end(self) -> None:
        self.status = ResourceStatus.STOPPED


class Workshop:
    """A runner whose resources start slowly or fail, as a test demands."""

    name = "workshop"

    def __init__(self) -> None:
        self.made: list[Thing] = []
        self.starts = 0
        self.under_way = 0
        self.under_way_max = 0
        self.seconds = 0.0
        self.end_seconds = 0.0
        self.errors: list[Exception] = []
        self.end_errors: list[Exception] = []

    async def start_resource(self, spec, resource_id=None, timeout=None):  # noqa: ASYNC109  # The documented name.
        self.starts += 1
        self.under_way += 1
        self.under_way_max = max(self.under_way, self.under_way_max)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(self.seconds)
            if self.errors:
                raise self.errors.pop(0)
        finally:
            self.under_way -= 1
        thing = Thing(resource_id or f"stock-{self.starts}", spec)
        self.made.append(thing)
        return thing

    async def end_resource(self, resource):
        await asyncio.sleep(self.end_seconds)
        if self.end_errors:
            raise self.end_errors.pop(0)
        await resource.end()

    async def get_status(self, resource):
        return await resource.get_status()

    @property
    def alive(self) -> int:
        return sum(thing.status is ResourceStatus.RUNNING for thing in self.made)


@pytest.fixture
def workshop() -> Workshop:
    return Workshop()


@pytest.fixture
async def engine(workshop):
    made = ResourceEngine({"local": workshop, "workshop": workshop})
    yield made
    await made.close()
    assert workshop.alive == 0
    assert await made.monitor() == {}


async def counts(engine: ResourceEngine) -> tuple[int, int, int]:
    """Return total, free and acquired counts, summed over all pools."""
    pools = (await engine.monitor()).values()
    return tuple(sum(pool[name] for pool in pools) for name in ("total", "free", "acquired"))


async def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task, and let it run until it can only wait."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_methods_called_on_the_class_use_one_shared_engine(workshop):
    ResourceEngine._runners["workshop"] = workshop  # As in the tests of the original.
    try:
        one = await ResourceEngine.acquire("shared", Spec(), backend="workshop")
        assert await ResourceEngine.acquire("shared", Spec(), backend="workshop") is one
        assert await ResourceEngine.get_status("shared") is ResourceStatus.RUNNING
        assert await ResourceEngine.reset("shared", 1, hard=True) == "fresh"
        assert one.resets == [((1,), {"hard": True})]
        await ResourceEngine.control("shared", cpu_count=2)
        [(key, pool)] = (await ResourceEngine.monitor()).items()
        assert key.startswith("thing:default|workshop")
        assert pool == {"total": 1, "free": 0, "acquired": 1}
        await ResourceEngine.release("shared")
        assert list((await ResourceEngine.monitor()).values()) == [
            {"total": 1, "free": 1, "acquired": 0}
        ]
        await ResourceEngine.close()
        assert await ResourceEngine.monitor() == {}
        assert workshop.alive == 0
    finally:
        del ResourceEngine._runners["workshop"]


async def test_an_engine_instance_has_its_own_resources(workshop):
    one, other = (ResourceEngine({"local": workshop}) for _ in range(2))
    await one.acquire("a", Spec())
    assert await other.monitor() == {}
    assert await other.acquire("a", Spec()) is not await one.acquire("a", Spec())
    await one.close()
    await other.close()


async def test_the_last_released_resource_is_reused_first(engine, workshop):
    first, second = await engine.acquire("a", Spec()), await engine.acquire("b", Spec())
    await engine.release("a")
    await engine.release("b")
    assert await engine.acquire("c", Spec()) is second
    assert await engine.acquire("d", Spec()) is first
    assert workshop.starts == 2
    assert first.resets == [((), {})], "the resource was reset between its users"


@pytest.mark.parametrize(
    "other",
    [Spec(colour="blue"), Spec(extra={"x": 1}), Spec(max_global_num=3)],
    ids=["a field", "extra", "the cap"],
)
async def test_different_specs_share_no_resources(engine, other):
    one = await engine.acquire("a", Spec())
    await engine.release("a")
    assert await engine.acquire("b", other) is not one
    assert len(await engine.monitor()) == 2


async def test_the_same_id_with_another_spec_or_backend_is_an_error_that_names_both(engine):
    await engine.acquire("a", Spec())
    with pytest.raises(ValueError, match=r"thing:default\|local.*thing:default\|local"):
        await engine.acquire("a", Spec(colour="blue"))
    with pytest.raises(ValueError, match=r"thing:default\|local.*thing:default\|workshop"):
        await engine.acquire("a", Spec(), backend="workshop")
    assert await counts(engine) == (1, 0, 1)


async def test_an_unknown_backend_is_an_error_before_anything_is_held(engine):
    for call in (engine.acquire("a", Spec(), backend="moon"), engine.start(Spec(), 1, "moon")):
        with pytest.raises(ValueError, match="no backend 'moon' here; available: local, workshop"):
            await call
    assert await engine.monitor() == {}


async def test_callers_of_one_id_share_a_single_start(engine, workshop):
    workshop.seconds = 0.02
    got = await asyncio.gather(*(engine.acquire("a", Spec()) for _ in range(5)))
    assert len({id(each) for each in got}) == 1
    assert workshop.starts == 1


async def test_start_makes_missing_resources_concurrently(engine, workshop):
    workshop.seconds = 0.02
    await engine.start(Spec(), size=3)
    assert await counts(engine) == (3, 3, 0)
    assert workshop.under_way_max == 3
    await engine.start(Spec(), size=3)
    assert workshop.starts == 3
    await engine.acquire("a", Spec())
    await engine.start(Spec(), size=3)
    assert await counts(engine) == (4, 3, 1)


async def test_a_start_beyond_the_cap_warns(engine):
    with pytest.warns(UserWarning, match="5 more resources wanted, 2 created: max_global_num"):
        await engine.start(Spec(max_global_num=2), size=5)
    assert await counts(engine) == (2, 2, 0)


async def test_simultaneous_starts_make_no_more_than_requested(engine, workshop):
    workshop.seconds = 0.02
    await asyncio.gather(*(engine.start(Spec(), size=2) for _ in range(3)))
    assert workshop.starts == 2


async def test_a_failed_start_among_several_keeps_the_other_resources_and_holds_no_slot(
    engine, workshop
):
    workshop.seconds = 0.01
    workshop.errors = [RuntimeError("no image")]
    with pytest.raises(RuntimeError, match="no image"):
        await engine.start(Spec(max_global_num=3), size=3)
    assert await counts(engine) == (2, 2, 0)
    await engine.start(Spec(max_global_num=3), size=3)
    assert await counts(engine) == (3, 3, 0)


async def test_a_start_that_is_cancelled_leaves_nothing_behind(engine, workshop):
    workshop.seconds = 60
    task = await begin(engine.start(Spec(), size=3))
    assert await counts(engine) == (3, 0, 3), "starting resources count"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await engine.monitor() == {}
    assert workshop.under_way == 0


async def test_the_error_of_a_start_that_times_out_names_id_and_pool(engine, workshop):
    workshop.seconds = 60
    for _ in range(2):
        with pytest.raises(asyncio.TimeoutError, match=r"'a' of thing:default\|local.* 0.01 s"):
            await engine.acquire("a", Spec(), timeout=0.01)
    with pytest.raises(asyncio.TimeoutError):
        await engine.start(Spec(), timeout=0.01)
    assert await engine.monitor() == {}


async def test_waiters_are_served_in_the_order_they_came(engine, workshop):
    await engine.acquire("holder", ALONE)
    served: list[str] = []

    async def wait(name: str) -> None:
        await engine.acquire(name, ALONE)
        served.append(name)
        await engine.release(name)

    tasks = [await begin(wait(name)) for name in "abcde"]
    await engine.release("holder")
    late = asyncio.create_task(wait("late"))
    await asyncio.gather(*tasks, late)
    assert served == [*"abcde", "late"]
    assert workshop.starts == 1


async def test_the_wait_for_a_free_place_is_limited_only_by_the_wait_timeout(engine):
    await engine.acquire("holder", ALONE)
    with pytest.raises(
        asyncio.TimeoutError, match=r"no resource of .* was free for 'a' within 0.01 s"
    ):
        await engine.acquire("a", ALONE, timeout=0.001, wait_timeout=0.01)
    patient = asyncio.create_task(engine.acquire("b", ALONE, timeout=0.001))
    await asyncio.sleep(0.02)  # Longer than `timeout`, which bounds starts only.
    await engine.release("holder")
    await patient
    assert await counts(engine) == (1, 0, 1)


async def test_a_waiter_that_gives_up_takes_no_wake_up_from_other_waiters(engine):
    await engine.acquire("holder", ALONE)
    first = await begin(engine.acquire("a", ALONE))
    second = await begin(engine.acquire("b", ALONE))
    first.cancel()
    await engine.release("holder")
    assert (await second).resource_id == "holder"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await counts(engine) == (1, 0, 1)


async def test_the_end_of_a_resource_and_a_failed_start_wake_the_next_waiter(engine, workshop):
    await engine.acquire("holder", ALONE)
    first = await begin(engine.acquire("a", ALONE))
    second = await begin(engine.acquire("b", ALONE))
    workshop.errors = [RuntimeError("broken")]
    await engine.end("holder")
    with pytest.raises(RuntimeError, match="broken"):
        await first
    assert (await second).resource_id == "b"
    assert workshop.alive == 1


async def test_the_cancellation_of_a_caller_undoes_its_start(engine, workshop):
    workshop.seconds = 60
    task = await begin(engine.acquire("a", Spec()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await engine.monitor() == {}
    workshop.seconds = 0
    await engine.acquire("a", Spec())


async def test_the_error_of_a_cancelled_caller_is_not_logged(engine, workshop):
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))
    workshop.seconds = 0.03
    workshop.errors = [RuntimeError("broken")]
    first = await begin(engine.acquire("a", Spec()))
    second = await begin(engine.acquire("a", Spec()))
    first.cancel()
    with pytest.raises(RuntimeError, match="broken"):
        await second
    del first, second
    await asyncio.sleep(0)  # The step that woke this task refers to `second`.
    gc.collect()  # asyncio logs the error when the future is deleted.
    assert seen == []


async def test_a_start_continues_if_one_of_two_callers_is_cancelled(engine, workshop):
    workshop.seconds = 0.03
    first = await begin(engine.acquire("a", Spec()))
    second = await begin(engine.acquire("a", Spec()))
    first.cancel()
    assert (await second).resource_id == "a"
    assert workshop.starts == 1


async def test_a_resource_released_during_its_start_is_free_afterwards(engine, workshop):
    workshop.seconds = 0.02
    task = await begin(engine.acquire("a", ALONE))
    await engine.release("a")
    assert await counts(engine) == (1, 0, 1), "the cap still counts it"
    await task
    assert await counts(engine) == (1, 1, 0)


async def test_acquire_fails_if_its_resource_is_ended_during_the_start(engine, workshop):
    workshop.seconds = 60
    task = await begin(engine.acquire("a", Spec()))
    await engine.end("a")
    with pytest.raises(BackendError, match="'a' was ended during its start"):
        await task
    assert await engine.monitor() == {}
    assert workshop.under_way == 0


@pytest.mark.parametrize("flaw", ["reset fails", "dead", "dead and cannot be reset"])
async def test_an_unusable_resource_is_ended_and_its_slot_reused(engine, workshop, flaw):
    thing = await engine.acquire("a", ALONE)
    if flaw != "dead":
        thing.reset_error = (
            RuntimeError("stuck") if flaw == "reset fails" else NotImplementedError()
        )
    if flaw != "reset fails":
        thing.status = ResourceStatus.FAILED
    waiter = await begin(engine.acquire("b", ALONE))
    await engine.release("a")
    assert await waiter is not thing
    assert thing.status is ResourceStatus.STOPPED


async def test_a_healthy_resource_without_reset_is_reused(engine):
    thing = await engine.acquire("a", Spec())
    thing.reset_error = NotImplementedError()
    await engine.release("a")
    assert await engine.acquire("b", Spec()) is thing


async def test_a_dead_free_resource_is_not_reused(engine):
    thing = await engine.acquire("a", Spec())
    await engine.release("a")
    thing.status = ResourceStatus.FAILED
    assert await engine.acquire("b", Spec()) is not thing
    assert await counts(engine) == (1, 0, 1)


async def test_a_free_resource_that_does_not_answer_within_the_timeout_is_replaced(engine):
    silent = await engine.acquire("a", ALONE)
    await engine.release("a")
    silent.get_status = asyncio.Event().wait
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.acquire("b", ALONE), 0.1)
    assert await engine.acquire("c", ALONE, timeout=0.1) is not silent


async def test_a_resource_whose_status_takes_too_long_is_ended(engine, monkeypatch):
    monkeypatch.setattr(store, "STATUS_SECONDS_MAX", 0.05)
    released, free = [await engine.acquire(name, Spec()) for name in "ab"]
    await engine.release("b")
    released.get_status = free.get_status = asyncio.Event().wait
    await engine.release("a")
    assert await engine.monitor() == {}
    await engine.start(Spec())
    assert released.status is free.status is ResourceStatus.STOPPED
    assert await counts(engine) == (1, 1, 0)


async def test_a_caller_cancelled_while_a_dead_resource_ends_holds_no_slot(engine, workshop):
    thing = await engine.acquire("a", ALONE)
    await engine.release("a")
    thing.status = ResourceStatus.FAILED
    workshop.end_seconds = 0.05
    task = await begin(engine.acquire("b", ALONE))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await engine.monitor() == {}
    workshop.end_seconds = 0
    assert await engine.acquire("c", ALONE) is not thing


async def test_operations_on_unknown_ids_raise_errors(engine):
    await engine.release("nobody")
    await engine.end("nobody")
    for call in (engine.reset, engine.get_status, engine.control):
        with pytest.raises(ValueError, match="'nobody' has no resource"):
            await call("nobody")


async def test_get_status_of_a_resource_that_starts_raises_an_error(engine, workshop):
    workshop.seconds = 0.02
    task = await begin(engine.acquire("a", Spec()))
    with pytest.raises(ValueError, match="still being made"):
        await engine.get_status("a")
    await task


async def test_close_fails_waiters_and_the_backend_can_be_used_again(engine, workshop):
    await engine.acquire("a", ALONE)
    waiter = await begin(engine.acquire("b", ALONE))
    workshop.seconds = 60
    starter = await begin(engine.acquire("c", Spec()))
    await engine.close()
    for task in (waiter, starter):
        with pytest.raises(EngineClosedError, match="engine closed"):
            await task
    assert await engine.monitor() == {}
    workshop.seconds = 0
    await engine.acquire("a", ALONE)


async def test_close_reports_resources_that_cannot_be_ended_and_can_be_repeated(engine, workshop):
    await engine.acquire("a", Spec())
    workshop.end_errors = [RuntimeError("it bites")]
    with pytest.raises(BackendError, match=r"did not end \(1\): a of thing:default.* it bites"):
        await engine.close()
    assert await counts(engine) == (1, 0, 1), "the resource may still run, so it counts"
    await engine.close()
    assert workshop.alive == 0


async def test_a_resource_that_cannot_be_ended_keeps_its_slot(engine, workshop):
    await engine.acquire("a", ALONE)
    workshop.end_errors = [RuntimeError("it bites")]
    with pytest.raises(BackendError, match=r"a of thing:default.* could not be ended: it bites"):
        await engine.end("a")
    with pytest.raises(asyncio.TimeoutError):
        await engine.acquire("b", ALONE, wait_timeout=0.01)


async def test_threads_with_their_own_event_loops_share_a_backend(workshop):
    engine = ResourceEngine({"local": workshop})
    spec = Spec(max_global_num=2)
    most = [0]
    holding = [0]
    guard = threading.Lock()

    async def work(seed: int) -> None:
        draw = random.Random(seed)
        for turn in range(20):
            name = f"{seed}-{turn}"
            await engine.acquire(name, spec, wait_timeout=60)
            with guard:
                holding[0] += 1
                most[0] = max(most[0], holding[0])
            await asyncio.sleep(draw.random() / 2000)  # The use of the resource.
            with guard:
                holding[0] -= 1
            await (engine.release(name) if draw.random() < 0.7 else engine.end(name))

    threads = [threading.Thread(target=asyncio.run, args=(work(each),)) for each in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert most[0] == 2
    await engine.close()
    assert workshop.alive == 0


@pytest.mark.parametrize("seed", range(30))
async def test_caps_of_pools_hold_under_random_operations(workshop, seed):
    """Random calls and cancellations at random moments, with two pools and few ids."""
    draw = random.Random(seed)
    engine = ResourceEngine({"local": workshop})
    workshop.seconds = 0.001
    specs = [Spec(max_global_num=2), Spec(colour="blue", max_global_num=1)]
    tasks: list[asyncio.Task[Any]] = []
    for _ in range(120):
        name = f"id{draw.randrange(6)}"
        match draw.randrange(9):
            case 0 | 1 | 2:
                spec = draw.choice(specs)
                tasks.append(asyncio.ensure_future(engine.acquire(name, spec, wait_timeout=0.02)))
            case 3 | 4:
                tasks.append(asyncio.ensure_future(engine.release(name)))
            case 5:
                tasks.append(asyncio.ensure_future(engine.end(name)))
            case 6:
                workshop.errors = [RuntimeError("broken")]
            case 7 if tasks:
                draw.choice(tasks).cancel()
            case 8 if workshop.made:
                draw.choice(workshop.made).status = ResourceStatus.FAILED
        if draw.random() < 0.5:
            await asyncio.sleep(draw.random() / 500)  # Other operations run meanwhile.
        assert workshop.under_way + workshop.alive <= 3
    await asyncio.gather(*tasks, return_exceptions=True)
    for pool in engine._store._pools.values():
        pool.check()
        assert not pool.waiters
        assert pool.moving == 0
    for each in range(6):
        await engine.release(f"id{each}")
    total, free, acquired = await counts(engine)
    assert acquired == 0
    assert free == total
    await engine.close()
    assert workshop.alive == 0


async def test_a_service_that_stopped_answering_is_ended_and_not_handed_out(tmp_path):
    serve = "import http.server as h, os; "
    serve += "h.test(h.SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"
    script = f"""{sys.executable} -c "{serve}" & echo $! > pid; wait; exec sleep 1000"""
    spec = ServiceResourceSpec(
        command=["sh", "-c", script],
        workdir=str(tmp_path),
        readiness=Readiness(path="/"),
        max_global_num=1,
    )
    engine = ResourceEngine()
    first = await engine.acquire("a", spec)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert await engine.get_status("a") is ResourceStatus.PENDING
    await engine.release("a")
    assert await engine.monitor() == {}, "the resource was ended"
    second = await engine.acquire("a", spec)
    assert second is not first
    await engine.release("a")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    third = await engine.acquire("b", spec)
    assert third is not second, "it was checked again before its next use"
    assert await engine.get_status("b") is ResourceStatus.RUNNING
    await engine.release("b")
    assert await engine.acquire("c", spec) is third
    await engine.close()


async def test_a_limit_above_the_size_of_the_machine_is_refused():
    spec = ProcessResourceSpec(command=["sleep", "1000"], cpu_count=4096)
    with pytest.raises(BackendError, match=r"does not have the requested resources: .*cpus"):
        await ResourceEngine.acquire("a", spec)
    assert await ResourceEngine.monitor() == {}


async def test_no_processor_is_assigned_to_two_resources():
    count = len(os.sched_getaffinity(0))
    spec = ProcessResourceSpec(command=["sleep", "1000"], cpu_count=count)
    await ResourceEngine.acquire("all of them", spec)
    one = ProcessResourceSpec(command=["sleep", "1000"], cpu_count=1)
    with pytest.raises(BackendError, match="does not have the requested resources free now"):
        await ResourceEngine.acquire("one more", one)
    await ResourceEngine.end("all of them")
    await ResourceEngine.acquire("one more", one)
    await ResourceEngine.close()


async def test_a_python_object_of_this_process_can_be_a_resource():
    spec = LocalEnvResourceSpec(env_cls_path="decimal.Decimal", init_kwargs={"value": "1.5"})
    thing = await ResourceEngine.acquire("a", spec)
    assert thing.is_finite()
    with pytest.raises(ValueError, match="env_cls_path: expected a class"):
        await ResourceEngine.acquire("none", LocalEnvResourceSpec(env_cls_path=""))
    await thing.end()
    assert await ResourceEngine.get_status("a") is ResourceStatus.STOPPED
    with pytest.raises(BackendError, match="a was ended"):
        await ResourceEngine.reset("a")
    await ResourceEngine.release("a")
    assert await ResourceEngine.acquire("c", spec) is not thing, "the user has ended it"
    missing = LocalEnvResourceSpec(env_cls_path="no.such.Thing")
    with pytest.raises(BackendError, match=r"no\.such\.Thing was not made"):
        await ResourceEngine.acquire("b", missing)
    await ResourceEngine.close()


@pytest.mark.parametrize("kind", [*SPECS.values(), PodServiceResourceSpec, RayJobResourceSpec])
def test_every_spec_refuses_categories_of_other_specs(kind):
    needs: dict[str, Any] = {"command": ["x"]} if issubclass(kind, ProcessResourceSpec) else {}
    needs |= {"model_name_or_path": "m"} if kind is VLLMModelResourceSpec else {}
    assert pool_key(kind(category=kind.category, **needs), "b") == pool_key(kind(**needs), "b")
    other = "vllm" if kind.category != "vllm" else "container"
    with pytest.raises(SpecError, match=f"category: expected {kind.category} or one of your own"):
        kind(category=other, **needs)
    with pytest.raises(SpecError, match="category: "):
        kind(category=7, **needs)


def test_the_default_category_of_a_spec_comes_from_its_class():
    class Plain(ContainerResourceSpec):
        category = "plain"

    assert Plain(image="x").category == "plain"
    assert ContainerResourceSpec(image="x", category="plain").category == "plain"


async def test_a_custom_category_uses_its_registered_runner(engine, workshop):
    spec = ContainerResourceSpec(category="my_env", image="python:3")
    with pytest.raises(ValueError, match=r"no runner for the category 'my_env' at .*register"):
        await ResourceEngine.acquire("a", spec)
    assert await ResourceEngine.monitor() == {}
    own = Workshop()
    engine.register("my_env", own)
    thing = await engine.acquire("a", spec)
    assert (own.made, workshop.made) == ([thing], [])
    assert next(iter(await engine.monitor())).startswith("my_env:python:3|local|")
    assert await engine.acquire("b", spec, "workshop") is workshop.made[0], "by its backend"
    await engine.end("a")
    assert own.alive == 0


@pytest.mark.parametrize("category", ["python_env", "scienceworld", "alfworld", "webshop"])
def test_the_spec_of_an_environment_becomes_a_container_spec_for_backends(category):
    spec = ContainerResourceSpec(category=category, image="python:3")
    assert plain(spec) == ContainerResourceSpec(image="python:3")
    assert pool_key(spec, "local").startswith(f"{category}:python:3|local|")
    other = ProcessResourceSpec(command=["x"], category=category)
    assert plain(other) is other


async def test_a_runner_registered_on_the_class_works_in_all_engines(workshop):
    ResourceEngine.register("python_env", workshop)
    try:
        spec = ContainerResourceSpec(category="python_env", image="python:3")
        assert await ResourceEngine.acquire("a", spec) is workshop.made[0]
        await ResourceEngine.close()
    finally:
        del ResourceEngine.shared()._categories["python_env", "local"]


@pytest.mark.parametrize(
    ("category", "runner", "reason"),
    [("container", Workshop(), "'container' is Moorage's"), ("x", object(), "Runner")],
)
def test_an_invalid_registration_is_refused(category, runner, reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        ResourceEngine({}).register(category, runner)


async def test_start_passes_keywords_to_the_runner_or_names_unknown_keywords(engine):
    class Choosy(Workshop):
        async def start_resource(self, spec, resource_id=None, timeout=None, *, paint="none"):  # noqa: ASYNC109  # As above.
            thing = await super().start_resource(spec, resource_id, timeout)
            thing.paint = paint
            return thing

    choosy = Choosy()
    engine.register("painted", choosy)
    spec = Spec(category="painted")
    with pytest.raises(
        TypeError,
        match=r"the runner of workshop knows no argument 'glaze'; it knows: timeout, paint",
    ):
        await engine.start(spec, paint="blue", glaze=True)
    assert await engine.monitor() == {}
    await engine.start(spec, size=2, paint="blue", timeout=5)
    assert [each.paint for each in choosy.made] == ["blue", "blue"]
    with pytest.raises(TypeError, match=r"workshop knows no argument 'resource_id'"):
        await engine.start(Spec(), resource_id="mine")


async def test_built_in_runners_name_their_keywords():
    with pytest.raises(TypeError, match="the runner of local knows no argument 'colour'"):
        await ResourceEngine.start(ProcessResourceSpec(command=["sleep", "1"]), colour="red")


class Resettable:
    """An environment whose reset has arguments."""

    def reset(self, *args, **kwargs):
        self.given = args, kwargs


async def test_a_context_accepts_the_value_none_for_missing_metadata():
    context = Context(rollout_id="r", group_id="g", metadata=None, context_config=None)
    with pytest.raises(ValueError, match="no backend 'nowhere'"):
        await context.acquire_resource(backend="nowhere")
    assert context.metadata == {}
    spec = LocalEnvResourceSpec(env_cls_path=f"{__name__}.Resettable")
    thing = await context.acquire_resource(spec=spec)
    await context.reset_resource("rollout", 1, seed=2)
    assert thing.given == ((1,), {"seed": 2})
    await context.close()
    await ResourceEngine.close()
