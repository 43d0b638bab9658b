"""A folder for PYTHONPATH that gives servers a shifted calendar."""
