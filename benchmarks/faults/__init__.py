"""Runs two servers on one PostgreSQL under faults, and checks the clients' answers by laws."""
