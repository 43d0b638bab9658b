"""Every message on the socket, and every code a reply may carry."""
