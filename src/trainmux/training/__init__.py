"""See docs/layout.md."""
