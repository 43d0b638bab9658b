"""The nouns of the house, each defined once: wire, core, ledger and clients share them."""
