"""Input and output of one turn of the core: events, facts and effects."""
