"""Train many PyTorch models at once, inside a memory budget you name."""
