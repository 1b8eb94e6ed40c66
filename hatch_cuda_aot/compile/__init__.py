"""The compilers: one module for each external program, and the processes that run them."""
