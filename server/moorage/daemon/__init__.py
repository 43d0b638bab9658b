"""The daemon: turns the crank, and introduces the rooms to each other."""
