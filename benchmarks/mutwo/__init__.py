"""The evaluation of the µ-TWO paper: many models of one architecture inside a budget. See docs/mutwo.md.

`cells` lists what there is to measure, `planned`, `baselines`, `convergence` and `timeline` measure it, `run`
does so cell by cell into one file of results, `tables` and `figures` read nothing but such a file.
"""
