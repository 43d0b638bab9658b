"""From a message to an event of the core, and from the core's answers to replies."""
