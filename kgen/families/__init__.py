"""One module a kernel family."""
