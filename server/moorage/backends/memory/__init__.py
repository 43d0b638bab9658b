"""The backend `memory`: starts nothing, for rehearsals and tests."""
