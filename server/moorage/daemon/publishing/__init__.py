"""How versions of policies are checked, registered, put to work and watched."""
