"""Handles requests and leases from their arrival to their end. The allocator is the only caller."""
