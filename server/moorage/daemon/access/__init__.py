"""Access: tokens, logins, tickets and rights; and the tokens of leases."""
