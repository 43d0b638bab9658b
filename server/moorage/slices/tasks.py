"""The user's function, and its wrapper in a task's process, for hosts and jobs."""

from moorage.slices.ray_values import RayValue, UserFunction


def plain(function: RayValue) -> UserFunction:
    """Return the user's function: the function itself, or that of Ray's remote function.

    Raises:
        TypeError: `function` is neither; for example, it is the result of `options(…)`.
    """
    found: RayValue = getattr(function, "_function", function)
    if not callable(found):
        raise TypeError(
            f"expected a function or Ray's remote function, not {function!r}; give the remote"
            " function without options(…): the slice or the configuration decides its resources"
        )
    return found  # type: ignore[no-any-return]  # As callable.


def reporting(function: UserFunction) -> UserFunction:
    """Wrap a function so that it reports its result or error to the caller of the task.

    If a task raises `SystemExit`, or an error that Ray cannot send, Ray ends its process and
    reports only that a worker died. With this wrapper, `SystemExit` with 0 or no code returns None;
    with another code it becomes a `RuntimeError` with the code's text. An error that cannot be sent
    becomes a `RuntimeError` with the error's name and text.

    Args:
        function: The user's function. Ray sends the wrapper by value: nodes need not have this
            package.
    """

    def run(*args: RayValue, **kwargs: RayValue) -> RayValue:
        import pickle  # noqa: PLC0415  # Ray sends this function to other nodes.
        import traceback  # noqa: PLC0415  # As above.

        from ray import cloudpickle  # noqa: PLC0415  # As above.

        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            if hasattr(error, "ray_terminate_msg"):  # Ray itself ends this process.
                raise
            if error.code is None or error.code == 0:
                return None
            code = error.code
            text = code if isinstance(code, str) else f"exit status {code}"
            trouble = f"SystemExit: {text}"
        except Exception as error:  # noqa: BLE001  # Whatever the user's code raises.
            try:
                "".join([str(error), *traceback.format_exception(error)]).encode()
                pickle.loads(cloudpickle.dumps(error))  # type: ignore[no-untyped-call]  # noqa: S301  # Our own words.
            except Exception:  # noqa: BLE001  # Whatever it is that its own methods raise.
                try:
                    text = str(error)
                except Exception:  # noqa: BLE001  # As above.
                    text = "the actor cannot describe itself"
                trouble = f"{type(error).__name__}: {text}"
            else:
                raise
        readable = trouble.encode(errors="backslashreplace").decode()
        raise RuntimeError(readable) from None

    return run
