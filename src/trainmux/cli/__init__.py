"""The command line, on the public surface only. See docs/layout.md."""
