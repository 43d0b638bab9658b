"""The jailed side of the sandbox: the zygote and the cells that are forked from it."""
