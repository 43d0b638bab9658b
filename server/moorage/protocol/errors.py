"""The errors of reading messages.

    ProtocolError(ValueError)
    ├── BadMessage    the server could not read a client's message
    └── BadReply      a client could not read the server's text

The gateway, the HTTP port and the client package catch these errors.
"""

from moorage.model import Code
from moorage.records.json_values import JsonMapping


class ProtocolError(ValueError):
    """A text does not match the protocol."""


class BadMessage(ProtocolError):  # noqa: N818  # The term of the wire, as in the code `bad_message`.
    """A message cannot be read; the error has all data for the failure reply.

    Args:
        code: The error code, for programs.
        reason: One sentence for a person, naming the field.
        field: Path of the wrong field, e.g. `resources.gpus`; empty for the whole message.
        expected: The expected value.
        id: The message's own `id`, if it could be read.
        details: Further data for the `error` object, e.g. `missing`.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        field: str = "",
        expected: str = "",
        id: str | int | None = None,  # noqa: A002  # The name of the field on the wire.
        details: JsonMapping | None = None,
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.field = field
        self.expected = expected
        self.id = id
        self.details: JsonMapping = details or {}


class BadReply(ProtocolError):  # noqa: N818  # The counterpart of BadMessage.
    """The server sent a text that is neither a reply nor an event."""
