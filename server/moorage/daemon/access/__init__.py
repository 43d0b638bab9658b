"""Who may connect and what they may do: tokens, logins, tickets, rights; and tokens of leases."""
