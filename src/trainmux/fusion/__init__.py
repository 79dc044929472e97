"""Fuse one member's graph to a width: the same graph for that many members at once."""

from trainmux.fusion._fuse import FusedGraph, fuse
