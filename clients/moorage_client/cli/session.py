"""The common part of all commands: server, token, output, and the registration of a command.

Every command of `program` is a function of a `CommandSession` and its own options; `command` adds
the shared options to the function, so that users can write them before or after the command's name.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from moorage.records.json_values import JsonMapping, JsonValue
from moorage_client.cli.output import OutputFormat, as_yaml, note, print_json, say
from moorage_client.endpoint import setting, split_addresses

if TYPE_CHECKING:
    from moorage_client.client import Client
    from moorage_client.services import Services

T = TypeVar("T")

_shared_option = partial(typer.Option, rich_help_panel="Server and output")

_DEFAULT = re.compile(r"ws://(127\.0\.0\.1|localhost|\[::1\]):8765/?")


Url = Annotated[
    str | None,
    _shared_option(
        help="WebSocket URL of the server, or of several: URL,URL (MOORAGE_URL, else ws://127.0.0.1:8765)",
        metavar="URL",
    ),
]
HttpUrl = Annotated[
    str | None,
    _shared_option(
        help="HTTP URL of the server, or of several (MOORAGE_HTTP_URL, else http://127.0.0.1:8080)",
        metavar="URL",
    ),
]
Token = Annotated[
    str | None,
    _shared_option(
        help="Your token, if the server needs one (MOORAGE_TOKEN, else MOORAGE_TOKEN_FILE)",
        metavar="TOKEN",
    ),
]
Json = Annotated[bool, _shared_option("--json", help="Print exactly one JSON document on stdout")]
Timeout = Annotated[
    float | None,
    _shared_option(
        help="Most seconds to wait for an answer, in addition to --wait (else 30)",
        min=0.001,
        metavar="SECONDS",
    ),
]
CaFile = Annotated[
    str | None,
    _shared_option(
        help="PEM file of the authority that signed the server's certificate (MOORAGE_CA_FILE, "
        "else SSL_CERT_FILE, else those known here)",
        metavar="FILE",
    ),
]
OutputOption = Annotated[
    OutputFormat | None,
    _shared_option(
        "--output",
        "-o",
        help="How results are printed: table, wide (with details), json or yaml",
        metavar="FORMAT",
    ),
]


@dataclass(frozen=True, slots=True)
class CommandSession:
    """The values of the options that all commands share, and how a command uses them.

    Args:
        url: WebSocket URL of the server, or of several, separated by commas.
        http_url: HTTP URL of the server, or of several, separated by commas.
        json: Print exactly one JSON document on stdout.
        timeout: Longest time for an answer in seconds, in addition to `--wait`.
        output: The output format, unless `json` is set.
        ca_file: File of the authority that signed the server's certificate.
    """

    url: Url = None
    http_url: HttpUrl = None
    token: Token = None
    json: Json = False
    timeout: Timeout = None
    output: OutputOption = None
    ca_file: CaFile = None

    @property
    def wide(self) -> bool:
        """Whether tables show their additional columns."""
        return self.output is OutputFormat.WIDE

    def run(self, work: Callable[["Client"], Coroutine[object, object, T]]) -> T:
        """Connect, do `work` with the client, and return its result."""
        from moorage_client.client import TIMEOUT_SECONDS, Client  # noqa: PLC0415  # Slow to import.

        _check_scheme("--url", self.url, "ws", "wss")

        async def run_connected() -> T:
            async with Client(
                self.url,
                self.token,
                timeout=self.timeout or TIMEOUT_SECONDS,
                ca_file=self.ca_file,
                on_lost=lambda reason: note(f"moorage: {reason}; trying again"),
            ) as client:
                return await work(client)

        return asyncio.run(run_connected())

    def say(self, document: JsonValue, text: str) -> None:
        """Print the outcome of a command: the document with `--json`, else the text."""
        if self.json:
            print_json(document)
        else:
            say(text)

    def show(self, document: T, print_in_words: Callable[[T], object]) -> None:
        """Print the outcome of a command: the document with `--json`, else in words."""
        if self.json:
            print_json(document)
        else:
            print_in_words(document)

    def services(self) -> "Services":
        """Return a client of the server's HTTP port, to be used in a `with`.

        Raises:
            typer.BadParameter: Only the WebSocket's URL is given, so the default HTTP URL may be
                another server's.
        """
        from moorage_client.services import SECONDS_MAX, Services  # noqa: PLC0415  # Slow to import.

        _check_scheme("--http-url", self.http_url, "http", "https")
        socket = setting(self.url, "MOORAGE_URL")
        named = setting(self.http_url, "MOORAGE_HTTP_URL")
        if socket and not named and not all(map(_DEFAULT.match, split_addresses(socket))):
            raise typer.BadParameter(
                f"{socket} is the address of the server's WebSocket; this command also needs the"
                " HTTP address: give --http-url or MOORAGE_HTTP_URL"
            )

        return Services(
            self.http_url, self.token, timeout=self.timeout or SECONDS_MAX, ca_file=self.ca_file
        )


def _check_scheme(option: str, url: str | None, *schemes: str) -> None:
    for each in split_addresses(url) if url is not None else ():
        if each.partition("://")[0] not in schemes:
            raise typer.BadParameter(f"{option}: expected {schemes[0]}://HOST:PORT, got {each!r}")


def _refuse_blanks(context: typer.Context, options: JsonMapping) -> None:
    """Refuse an empty name in a list of names, for example from an empty variable of a script."""
    for each in context.command.params:
        given = options.get(each.name or "") if each.param_type_name == "option" else None
        if isinstance(given, list) and any(isinstance(v, str) and not v.strip() for v in given):
            wanted = "expected a name, got a blank; omit the option to allow any name"
            raise typer.BadParameter(f"{each.opts[0]}: {wanted}")


_SHARED = inspect.signature(CommandSession).parameters


def command(
    app: typer.Typer, name: str, *, options_first: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command, with the shared options after its own.

    Args:
        app: The program to add the command to.
        name: The command's name.
        options_first: Whether the first argument ends the options; the rest then belongs to another
            command.

    Returns:
        A decorator; the function's first parameter is the session.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def invoke(context: typer.Context, **options: Any) -> None:
            _refuse_blanks(context, options)
            given = {name: options.pop(name) for name in _SHARED}
            named = {name: value for name, value in given.items() if value not in (None, False)}
            before: CommandSession = context.find_object(CommandSession) or CommandSession()
            session = replace(before, **named)
            as_yaml.set(session.output is OutputFormat.YAML)
            if session.output in {OutputFormat.JSON, OutputFormat.YAML}:
                session = replace(session, json=True)
            function(session, **options)

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        context = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        by_name = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*own, *_SHARED.values())
        ]
        parameters = [context, *by_name]
        invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Functions may have one.
        invoke.__annotations__ = {p.name: p.annotation for p in parameters}
        invoke.__doc__ = function.__doc__
        settings = {"allow_interspersed_args": False} if options_first else None
        app.command(name, context_settings=settings)(invoke)
        return function

    return register
