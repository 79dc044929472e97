"""Measurements behind every number that is claimed; not part of the installed package."""
