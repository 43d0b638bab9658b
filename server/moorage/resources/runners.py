"""The built-in runners of `ResourceEngine`: one for each available backend.

A backend is opened at its first use, so that importing this module is cheap. Workloads that the
library starts end with the process that started them; workloads that must outlive a process belong
to a daemon.
"""

import asyncio
import atexit
import contextlib
import fcntl
import functools
import importlib
import inspect
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from moorage.backends.base import (
    Backend,
    BackendError,
    BackendUnavailableError,
    UnsupportedSpecError,
)
from moorage.backends.local.backend import LocalBackend
from moorage.backends.local.gpus import gpus_here
from moorage.backends.memory.backend import MemoryBackend
from moorage.backends.registry import kinds
from moorage.backends.specs import (
    APIModelResourceSpec,
    BaseResourceSpec,
    ContainerResourceSpec,
    LocalEnvResourceSpec,
    VLLMModelResourceSpec,
)
from moorage.records.json_values import JsonObject
from moorage.resources import caretaker
from moorage.resources.resources import (
    BackendResource,
    BackendRunner,
    BaseResource,
    ContainerResource,
    ResourceStatus,
    Runner,
)

API_PROBE_SECONDS: Final = 0.5
"""Seconds between two checks that a model's service answers."""
API_SECONDS_MAX: Final = 2.0
"""Maximum seconds for one check that a model's service answers."""
LEFT_SECONDS_MAX: Final = 2.0
"""Maximum seconds for a backend to report whether a failed start left a workload."""
CHAT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum bytes of one answer of a model; the rest of a longer answer is not read."""
_DOWN_FROM: Final = 500
"""The lowest HTTP status that means that a service is down: a service that answers 401 is up."""


class APIModelResource(BaseResource):
    """A model behind an OpenAI-compatible address.

    Args:
        resource_id: The resource's name.
        spec: The spec, with the model's address.
    """

    def __init__(self, resource_id: str, spec: APIModelResourceSpec) -> None:
        self._id = resource_id
        self.spec = spec
        self.endpoint = spec.url

    @property
    def resource_id(self) -> str:
        """The name of the resource."""
        return self._id

    @property
    def category(self) -> str:
        """The category of the resource's spec."""
        return self.spec.category

    async def start(self) -> None:
        """Wait until the service answers. The caller must limit the time."""
        while await self.get_status() is not ResourceStatus.RUNNING:
            pause = API_PROBE_SECONDS
            await asyncio.sleep(pause)

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: a model stores no state of its users."""

    async def get_status(self) -> ResourceStatus:
        """Request the service's list of models; without an answer, the status is pending."""
        try:
            async with (
                asyncio.timeout(API_SECONDS_MAX),
                self._client() as client,
                client.stream("GET", f"{self.endpoint}/models") as reply,
            ):
                up = reply.status_code < _DOWN_FROM  # Only the status is read, not the list.
        except (httpx.HTTPError, TimeoutError):
            return ResourceStatus.PENDING
        return ResourceStatus.RUNNING if up else ResourceStatus.PENDING

    async def end(self) -> None:
        """Do nothing: another server runs the model."""

    async def generate_async(self, messages: list[JsonObject], **parameters: Any) -> JsonObject:
        """Send a chat to the model; return the service's reply.

        Args:
            messages: The chat, as the OpenAI-compatible API takes it.
            **parameters: More fields of the request, e.g. `temperature`.

        Raises:
            BackendError: The service did not answer, or its answer has no reply.
        """
        body = {"model": self.spec.model_name_or_path, "messages": messages, **parameters}
        return await _chat(self._client(), self.endpoint, body, self.spec.request_timeout)

    def _client(self) -> httpx.AsyncClient:
        key = self.spec.api_key
        return _client({"Authorization": f"Bearer {key}"} if key else {})


class VLLMModelResource(BackendResource):
    """A model served by vLLM."""

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: a model stores no state of its users, and a new start takes minutes."""

    async def generate_async(self, messages: list[JsonObject], **parameters: Any) -> JsonObject:
        """Send a chat to the model; see `APIModelResource.generate_async`."""
        assert isinstance(self.spec, VLLMModelResourceSpec)
        body = {"model": self.spec.model_name_or_path, "messages": messages, **parameters}
        return await _chat(_client({}), f"{self.endpoint}/v1", body, None)


def _client(headers: Mapping[str, str]) -> httpx.AsyncClient:
    headers = {"Accept-Encoding": "identity", **headers}  # No compressed answers.
    return httpx.AsyncClient(
        timeout=None,  # noqa: S113  # One deadline covers everything, dripping answers included.
        headers=headers,
        trust_env=False,
    )


async def _chat(
    client: httpx.AsyncClient, url: str, body: JsonObject, seconds: float | None
) -> JsonObject:
    content = bytearray()
    try:
        async with (
            asyncio.timeout(seconds),  # None: as long as the caller allows.
            client,
            client.stream("POST", f"{url}/chat/completions", json=body) as reply,
        ):
            reply.raise_for_status()
            async for chunk in reply.aiter_raw():
                content += chunk
                if len(content) > CHAT_BYTES_MAX:
                    raise BackendError(f"{url} answered with more than {CHAT_BYTES_MAX} bytes")
        document = json.loads(content)
    except TimeoutError as error:
        raise BackendError(f"{url} did not answer within {seconds:g} s") from error
    except (httpx.HTTPError, ValueError) as error:
        raise BackendError(f"{url} did not answer: {error}") from error
    if not isinstance(document, dict):
        raise BackendError(f"{url} answered with no object")
    return document


class LocalEnvResource(BaseResource):
    """An object in the caller's own process; the resource passes on its attributes.

    Args:
        resource_id: The resource's name.
        spec: The spec from which the object is created.

    Raises:
        BackendError: The class does not exist, or raised an error.
    """

    def __init__(self, resource_id: str, spec: LocalEnvResourceSpec) -> None:
        self._id = resource_id
        self._spec = spec
        self._ended = False
        self.env = _environment(spec)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object."""
        return getattr(self.env, name)

    @property
    def resource_id(self) -> str:
        """The name of the resource."""
        return self._id

    @property
    def category(self) -> str:
        """The category of the resource's spec."""
        return LocalEnvResourceSpec.category

    async def start(self) -> None:
        """Call the object's own `start`, if it has one."""
        await _call(self.env, "start")

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object's own `reset`, or if it has none, close the object and create another.

        Raises:
            TypeError: Arguments are given, but the object has no `reset`.
            BackendError: The object was ended, or the new object could not be created.
        """
        if self._ended:
            raise BackendError(f"{self.resource_id} was ended")
        if callable(getattr(self.env, "reset", None)):
            return await _call(self.env, "reset", *args, **kwargs)
        if args or kwargs:
            raise TypeError(f"{type(self.env).__name__} has no reset(), so it takes no arguments")
        await self.end()
        self.env = _environment(self._spec)
        self._ended = False
        return await self.start()

    async def get_status(self) -> ResourceStatus:
        """Return the status "running" until the object is ended."""
        return ResourceStatus.STOPPED if self._ended else ResourceStatus.RUNNING

    async def end(self) -> None:
        """Call the object's own `close`, if it has one; a second call does nothing."""
        if not self._ended:
            await _call(self.env, "close")
            self._ended = True


async def _call(target: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    method = getattr(target, name, None)
    if not callable(method):
        return None
    value = method(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


class ModelRunner(BackendRunner):
    """The runner of a backend that also serves models."""

    def resource_kind(self, spec: BaseResourceSpec) -> type[BackendResource]:
        """Return the class of the resource that a started workload becomes."""
        is_model = isinstance(spec, VLLMModelResourceSpec)
        return VLLMModelResource if is_model else super().resource_kind(spec)


class LocalRunner(ModelRunner):
    """The runner of the backend `local`: workloads on this machine, and clients of models.

    Args:
        backend: The backend that starts workloads; None: a backend whose workloads end with this
            process.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        super().__init__(_local() if backend is None else backend)

    async def start_resource(
        self,
        spec: BaseResourceSpec,
        resource_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name: it is the runner's.
    ) -> BaseResource:
        """Start a resource and wait until it is ready; see `Runner`."""
        name = resource_id or f"free-{uuid.uuid4().hex[:12]}"
        limits = [each for each in (timeout, spec.limit_seconds) if each is not None]
        match spec:
            case APIModelResourceSpec():
                made: BaseResource = APIModelResource(name, spec)
            case LocalEnvResourceSpec():
                made = LocalEnvResource(name, spec)
            case _:  # A backend may support users' own classes of specs.
                return await super().start_resource(spec, resource_id, timeout)
        async with asyncio.timeout(min(limits) if limits else None):
            await made.start()
        return made


def _environment(spec: LocalEnvResourceSpec) -> Any:
    """Create the object of a spec."""
    module, _, name = spec.env_cls_path.rpartition(".")
    if not module or not name:
        raise UnsupportedSpecError(
            f"env_cls_path: expected a class as `package.module.Class`, not {spec.env_cls_path!r}"
        )
    try:
        return getattr(importlib.import_module(module), name)(**spec.init_kwargs)
    except Exception as error:
        raise BackendError(
            f"{spec.env_cls_path or 'env_cls_path'} was not made: {error}"
        ) from error


class LazyRunner:
    """A runner that is created at its first use.

    Args:
        name: The name of the backend.
        make: Creates the runner.
    """

    def __init__(self, name: str, make: Callable[[], Runner]) -> None:
        self.name = name
        self._make = functools.cache(make)

    async def start_resource(
        self,
        spec: BaseResourceSpec,
        resource_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name: it is the runner's.
    ) -> BaseResource:
        """Start a resource by the runner, which is created if needed."""
        return await self._make().start_resource(spec, resource_id, timeout)

    async def end_resource(self, resource: BaseResource) -> None:
        """End a resource by the runner, which is created if needed."""
        await self._make().end_resource(resource)

    async def get_status(self, resource: BaseResource) -> ResourceStatus:
        """Return the status of a resource by the runner, which is created if needed."""
        return await self._make().get_status(resource)


def _home() -> Path:
    """Create a folder for this process, which is removed when the process ends.

    A killed process leaves its folder behind; the next process that calls this removes the folder.
    A lock shows whether the folder's process lives: process ids are reused, and two containers may
    use the same id.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    prefix = f"moorage-{os.getuid()}-"
    for old in base.glob(f"{prefix}*/lock"):
        with contextlib.suppress(OSError), old.open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(old.parent)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=base))
    # The descriptor is never closed, so the lock is held until this process and all forks end.
    lock = os.open(made / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    home = made.rename(made.with_name(made.name[1:]))  # Others find only locked folders.
    atexit.register(_leave, home, os.getpid())
    return home


def _leave(home: Path, owner: int) -> None:
    if os.getpid() == owner:  # Not in a fork, which has the same exit function.
        with contextlib.suppress(OSError):  # The folder is removed already.
            _remove(home)


def _remove(home: Path) -> None:
    """Remove a folder; rename it first, so that no ending supervisor writes into it."""
    gone = home.rename(home.with_name(f".{home.name}"))
    shutil.rmtree(gone, ignore_errors=True)


def _local() -> Backend:
    return LocalBackend(_home(), gpus=gpus_here(), outlive=False)


class RayContainerResource(ContainerResource):
    """A container on a node of a Ray cluster."""


class _CaredForRunner(ModelRunner):
    """The runner of a backend whose workloads would survive this process."""

    def __init__(self, name: str) -> None:
        root = Path(tempfile.mkdtemp(prefix=f"moorage-{name}-"))
        try:
            super().__init__(caretaker.open_backend(name, root))
        except BaseException:
            shutil.rmtree(root)
            raise
        self._name, self._root = name, root
        self._caretaker = caretaker.watch(name, root)
        self._started: set[BaseResource] = set()
        self._unended = 0

    async def start_resource(
        self,
        spec: BaseResourceSpec,
        resource_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The documented name: it is the runner's.
    ) -> BaseResource:
        self._count(1)
        try:
            resource = await super().start_resource(spec, resource_id, timeout)
        except (BackendUnavailableError, UnsupportedSpecError):
            self._count(-1)
            raise
        except Exception:
            with contextlib.suppress(BackendError, TimeoutError):
                async with asyncio.timeout(LEFT_SECONDS_MAX):
                    if not await self.backend.discover():
                        self._count(-1)
            raise
        self._started.add(resource)
        return resource

    async def end_resource(self, resource: BaseResource) -> None:
        await super().end_resource(resource)
        with contextlib.suppress(KeyError):  # The resource was ended before.
            self._started.remove(resource)
            self._count(-1)

    def _count(self, change: int) -> None:
        """Inform the caretaker that it has one more, or one fewer, workload to end."""
        self._unended += change
        try:
            os.write(self._caretaker, caretaker.BEGUN if change > 0 else caretaker.NOTHING)
        except BrokenPipeError:  # The caretaker was killed: a new one gets the whole count.
            os.close(self._caretaker)
            self._caretaker = caretaker.watch(self._name, self._root)
            os.write(self._caretaker, caretaker.BEGUN * self._unended)

    def resource_kind(self, spec: BaseResourceSpec) -> type[BackendResource]:
        """Return the class of the resource that a started workload becomes."""
        is_ray = isinstance(spec, ContainerResourceSpec) and self.backend.name == "ray"
        return RayContainerResource if is_ray else super().resource_kind(spec)


class RayRunner(LazyRunner):
    """The runner of the backend `ray`."""

    def __init__(self) -> None:
        super().__init__("ray", lambda: _CaredForRunner("ray"))


class CloudRunner(LazyRunner):
    """The runner of the backend `aws`."""

    def __init__(self) -> None:
        super().__init__("cloud", lambda: _CaredForRunner("aws"))


class K8sRunner(LazyRunner):
    """The runner of the backend `k8s`, which is also called `kubernetes`."""

    def __init__(self) -> None:
        super().__init__("k8s", lambda: _CaredForRunner("kubernetes"))


_DOCUMENTED: Final[Mapping[str, type[RayRunner | CloudRunner | K8sRunner]]] = {
    "ray": RayRunner,
    "aws": CloudRunner,
    "kubernetes": K8sRunner,
}
"""The documented runners, by the name of the backend's kind."""


def default_runners() -> Mapping[str, Runner]:
    """Return a runner for each available backend, by name."""
    runners: dict[str, Runner] = {
        "local": LazyRunner("local", lambda: LocalRunner(_local())),
        "memory": LazyRunner("memory", lambda: BackendRunner(MemoryBackend())),
    }
    for name, kind in kinds().items():
        if kind.engine_names and kind.installed:
            made = _DOCUMENTED.get(name)
            runner = made() if made else LazyRunner(name, functools.partial(_CaredForRunner, name))
            runners |= dict.fromkeys(kind.engine_names, runner)
    return runners
