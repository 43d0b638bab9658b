"""The backend `local`: it runs processes, services and containers on this machine."""
