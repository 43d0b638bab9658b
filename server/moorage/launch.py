"""Starts the programs: they import Python's own modules, and end without a traceback.

`moored` and `moorage` run in `run_program`. Programs that they start with `command` run in `main`.
This module imports little at its start, since it first makes sure that later imports find the
standard modules.
"""

import gc
import io
import os
import sys
from importlib import import_module
from importlib.machinery import BuiltinImporter, FrozenImporter

TYPE_CHECKING = False  # As `typing` has it, which is slow to import.
if TYPE_CHECKING:
    from typing import Any, Final, NoReturn

EXIT_INTERRUPTED: "Final" = 130
EXIT_UNWRITABLE: "Final" = 74
"""Exit code of a program that cannot write its result: `EX_IOERR` of sysexits.h."""
_STDOUT, _STDERR = 1, 2


class _Waiting(io.FileIO):
    """A standard stream that waits for its reader, even if another process made it non-blocking."""

    def write(self, data: "Any", /) -> int:
        while (written := super().write(data)) is None:
            import select  # noqa: PLC0415  # From the standard library, which is first by now.

            select.select([], [self], [])
        return written


class _Remarks(_Waiting):
    """Standard error. A failed write drops the text, so that it does not end the program."""

    def write(self, data: "Any", /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class _Results(_Waiting):
    """Standard output. A failed write ends the program, silently if the reader left."""

    def __init__(self, program: str) -> None:
        super().__init__(_STDOUT, "w", closefd=False)
        self._program = program

    def write(self, data: "Any", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, _STDOUT)  # The interpreter writes the rest there as it ends.
            os.close(null)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(0) from None  # The reader has seen enough, which is not a failure.
            sys.stderr.write(f"{self._program}: cannot write the result: {error.strerror}\n")
            raise SystemExit(EXIT_UNWRITABLE) from None


def run_program(name: str, module: str) -> "NoReturn":
    """Run a program and end the process.

    Args:
        name: The program's name, for its last line.
        module: The module whose `run` does the work, and returns the exit code.
    """
    try:
        _open_standard_streams(name)
        _put_standard_library_first()
        run = _import(name, module).run
        code = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        code = EXIT_INTERRUPTED
    raise SystemExit(code)


def _import(name: str, module: str) -> "Any":
    """Import a program's module. Ctrl-C ends the process: half imported modules may swallow it."""
    import signal  # noqa: PLC0415  # From the standard library, which is first by now.

    def end(*_: object) -> "NoReturn":
        os.write(_STDERR, f"{name}: interrupted\n".encode())
        os._exit(EXIT_INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # Else SIGINT is ignored, as below `nohup`.
        signal.signal(signal.SIGINT, end)
    imported = _import_quickly(module)
    signal.signal(signal.SIGINT, before)
    return imported


def _import_quickly(module: str) -> "Any":
    """Import a module without the garbage collector: imported modules stay.

    Repeated collections would take a tenth of the time of a short command.
    """
    gc.disable()
    imported = import_module(module)
    gc.freeze()
    gc.enable()
    return imported


def import_structlog() -> None:
    """Import structlog without rich: it needs rich for tracebacks, and our logs have none."""
    if "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # `import rich` fails by this.
        import_module("structlog")
        del sys.modules["rich"]


def command(module: str, *arguments: str) -> "list[str]":
    """Return the command that runs `main` of one of our modules in a separate process.

    The process imports neither from the working directory nor, in place of standard modules, from
    PYTHONPATH: policies lie there, under names such as `random.py`.
    """
    program = f"from {__name__} import main; main()"  # `-m` imports standard modules before it.
    return [sys.executable, "-P", "-c", program, module, *arguments]


def reason_of(error: Exception) -> str:
    """Return an error in words; for a system error, its message and the file."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or repr(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def find_hidden_modules() -> "list[tuple[str, str]]":
    """Return the files in PYTHONPATH with the name of a standard module, and that name."""
    found = []
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        for name in sorted(sys.stdlib_module_names):
            paths = (f"{name}.py", os.path.join(name, "__init__.py"))  # noqa: PTH118  # pathlib may be hidden.
            files = (os.path.join(folder or ".", path) for path in paths)  # noqa: PTH118  # As above.
            file = next(filter(os.path.isfile, files), None)
            if file and not any(each.find_spec(name) for each in (BuiltinImporter, FrozenImporter)):
                found.append((file, name))
    return found


def _put_standard_library_first() -> None:
    """Import standard modules from Python's own folder, not from PYTHONPATH."""
    library = os.path.dirname(os.__file__)  # noqa: PTH120  # As above. Frozen: it cannot be hidden.
    own = {
        library,
        os.path.join(library, "lib-dynload"),  # noqa: PTH118  # As above.
    }
    sys.path.sort(key=lambda folder: folder not in own)


def _open_standard_streams(name: str) -> None:
    """Replace closed standard streams by /dev/null; make streams escape what they cannot encode.

    Without open streams, the next files would get the streams' numbers, and libuv ends a process
    with such files.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)  # noqa: FBT003  # The os module's own signature.
    os.close(number)
    before = sys.stdout
    encoding = before.encoding if before else "utf-8"
    remarks = io.BufferedWriter(_Remarks(_STDERR, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(remarks, encoding, line_buffering=True)
    results = io.BufferedWriter(_Results(name))
    at_once = results.isatty() or getattr(before, "write_through", False)  # `python -u`.
    sys.stdout = io.TextIOWrapper(results, encoding, line_buffering=at_once)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # For any terminal.


def main() -> None:
    """Run `main` of the module that the first argument names, with the other arguments."""
    _put_standard_library_first()
    module = sys.argv.pop(1)
    try:
        _import_quickly(module).main()
    except KeyboardInterrupt:
        sys.stderr.write("moorage: interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None
