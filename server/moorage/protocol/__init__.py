"""Every message on the WebSocket, and every code that a reply may have.

The packages `gateway`, `web` and `daemon` read requests and write replies with it; the client
package does the reverse. `messages`: the messages of clients. `replies`: the replies of the server.
`codes`: the codes of refusals. `errors`: the exceptions of this package:

    ProtocolError(ValueError)
    ├── BadMessage    the server could not read a client's message
    └── BadReply      a client could not read the server's text

`protocol.faults.ServiceError` is not part of that tree: services raise it, and readers of messages
never do.
"""
