"""Policies, one file each: what is swapped, what is recomputed, and in which order nodes run."""
