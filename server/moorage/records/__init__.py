"""The shared records, each defined once, for the protocol, the core, the ledger and the clients."""
