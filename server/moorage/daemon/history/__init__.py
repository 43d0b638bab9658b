"""What was decided and what the fleet was, read from the ledger."""
