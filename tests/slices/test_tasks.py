"""Tests of the results and errors that tasks report about a user's function, without Ray."""

import io
import pickle
import sys
import threading

import pytest
import ray
from ray import cloudpickle

from moorage.slices import CpuAcceleratorConfig, RayExecutor, SlicePoolManager
from moorage.slices.tasks import reporting

pytestmark = pytest.mark.heavy  # The extra `ray`.


class Unpicklable(Exception):  # noqa: N818  # A user's class.
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


class UnpicklableThere(Exception):  # noqa: N818  # It can be sent, but not rebuilt.
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Mute(Exception):  # noqa: N818  # As above.
    def __str__(self):
        raise KeyError("this error has no text")


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit("bad arguments"), "SystemExit: bad arguments"),
        (SystemExit(2), "SystemExit: exit status 2"),
        (SystemExit(""), "SystemExit: "),
        (SystemExit("half a \ud800 surrogate"), r"SystemExit: half a \ud800 surrogate"),
        (Unpicklable("this", "that"), "Unpicklable: this and that"),
        (UnpicklableThere("this", "that"), "UnpicklableThere: this and that"),
        (ValueError("half a \ud800 surrogate"), r"ValueError: half a \ud800 surrogate"),
        (Mute(), "Mute: the actor cannot describe itself"),
    ],
)
def test_a_failed_task_reports_its_reason(error, text):
    with pytest.raises(RuntimeError) as caught:
        reporting(raises)(error)
    assert str(caught.value) == text


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_task_that_exits_with_0_returns_the_value_none(code):
    assert reporting(sys.exit)(code) is None


def test_a_picklable_exception_is_raised_unchanged():
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        reporting(raises)(error)
    assert caught.value is error
    assert reporting(divmod)(7, 2) == (3, 1)


def test_a_task_ended_by_ray_is_not_an_error_of_the_user():
    error = SystemExit(1)
    error.ray_terminate_msg = "The process receives a SIGTERM."
    with pytest.raises(SystemExit):
        reporting(raises)(error)


class Foreign(pickle.Unpickler):
    """An unpickler that cannot import `moorage`, as on a node that lacks the package."""

    def find_class(self, module, name):
        assert not module.startswith("moorage")
        return super().find_class(module, name)


def test_the_task_wrapper_is_pickled_by_value():
    sent = io.BytesIO(cloudpickle.dumps(reporting(divmod)))
    assert Foreign(sent).load()(7, 2) == (3, 1)


@pytest.mark.parametrize(
    "run",
    [
        lambda function: SlicePoolManager("v4-16").execute_on_each_host(function),
        lambda function: RayExecutor.execute(function, CpuAcceleratorConfig(core_count=1)),
    ],
)
def test_a_remote_function_with_options_is_refused_before_anything_runs(run):
    with pytest.raises(TypeError, match="give the remote function without options"):
        run(ray.remote(int).options(num_cpus=1))
