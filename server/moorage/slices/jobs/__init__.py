"""Jobs: what they need, how they are run and run again, and what came of them."""
